"""The block pool: reference counts under random operations, and block digests."""

import random

import numpy as np
import pytest

from perilune.engine.blocks import (
    NULL_BLOCK,
    BlockPool,
    Blocks,
    blocks_for,
    extend_digests,
    root_digest,
)


def digests(tokens: list[int], root: bytes = b"root") -> list[bytes]:
    chain: list[bytes] = []
    extend_digests(chain, root, np.array(tokens, dtype=np.int32))
    return chain


@pytest.mark.parametrize("count", [9, 200])
def test_random_operations_keep_references_and_free_list_consistent(count: int) -> None:
    rng = random.Random(count)
    pool = BlockPool(count)
    tables: list[Blocks] = []
    for operation in range(50_000):
        kind = rng.random()
        if kind < 0.4 and pool.num_free:
            blocks = pool.allocate(rng.randint(1, min(8, pool.num_free)))
            assert NULL_BLOCK not in blocks
            tables.append(blocks)
        elif kind < 0.6 and tables:
            blocks = rng.choice(tables)
            pool.share(blocks)
            tables.append(blocks)
        elif tables:
            index = rng.randrange(len(tables))
            tables[index], tables[-1] = tables[-1], tables[index]
            for block in pool.release(tables.pop()):
                pool.free(block)
        if operation % 500 == 0:
            references = np.zeros(count, dtype=np.int64)
            for blocks in tables:
                references[blocks] += 1
            assert np.array_equal(pool.references, references)
            assert sorted(pool._free) == [block for block in range(1, count) if not references[block]]
            assert pool.num_used == (references > 0).sum()


def test_block_digest_covers_earlier_tokens_and_weights_version() -> None:
    tokens = list(range(40))
    chain = digests(tokens)
    assert len(chain) == 2
    assert digests(tokens[:16]) == chain[:1]
    assert digests([99, *tokens[1:]])[1] != chain[1]
    roots = {root_digest(0, -1), root_digest(1, -1), root_digest(0, 0), root_digest(0, 1)}
    assert len(roots) == len({digests(tokens, root)[0] for root in roots}) == 4
    longer = chain.copy()
    extend_digests(longer, b"root", np.arange(64, dtype=np.int32))
    assert longer == digests(list(range(64)))


def test_blocks_for_rounds_up_to_whole_blocks() -> None:
    assert [blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
