"""The block pool: a hundred thousand random operations leak nothing, and what was recorded is found."""

from __future__ import annotations

import random

import numpy as np
import pytest

from perilune.engine.blocks import (
    BLOCK,
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


def check(pool: BlockPool, held: list[Blocks]) -> None:
    """Every block is held as often as it is counted, or free once."""
    references = np.zeros(pool.count, dtype=np.int64)
    for blocks in held:
        references[blocks] += 1
    assert np.array_equal(pool.references, references)
    free = [*pool._free, *pool._unused]
    assert sorted(free) == [block for block in range(1, pool.count) if not references[block]]
    assert pool.available == len(free)
    assert pool.used == pool.count - 1 - len(free)
    assert {pool._block_of[digest]: digest for digest in pool._block_of} == pool._digest_of
    assert set(pool._unused) <= set(pool._digest_of)
    assert not set(pool._free) & set(pool._digest_of)


@pytest.mark.parametrize("count", [9, 200])
def test_fifty_thousand_random_operations(count: int) -> None:
    rng = random.Random(count)
    pool = BlockPool(count)
    held: list[Blocks] = []
    content: dict[int, bytes] = {}  # what a block was last filled with
    names = [bytes([i]) for i in range(64)]
    for operation in range(50_000):
        kind = rng.random()
        if kind < 0.35 and pool.available:
            blocks = pool.allocate(rng.randint(1, min(8, pool.available)))
            assert NULL_BLOCK not in blocks
            for block in blocks.tolist():
                content.pop(block, None)
            held.append(blocks)
        elif kind < 0.5 and held:
            blocks = rng.choice(held)
            pool.share(blocks)
            held.append(blocks)
        elif kind < 0.6 and held:
            blocks = rng.choice(held)
            fresh = [block for block in blocks.tolist() if block not in content]
            for block in fresh:
                content[block] = rng.choice(names)
            pool.record({block: content[block] for block in fresh})
        elif kind < 0.7:
            wanted = rng.sample(names, 3)
            known, unused = pool.known(wanted)
            before = pool.available
            found = pool.find(wanted)
            assert [content[block] for block in found.tolist()] == wanted[: len(found)]
            assert (known, before - unused) == (len(found), pool.available)
            held.append(found)
        elif kind < 0.999 and held:
            index = rng.randrange(len(held))
            held[index], held[-1] = held[-1], held[index]
            pool.release(held.pop())
        elif kind >= 0.999:
            pool.forget_all()
            assert pool.known(names[:1]) == pool.known(names[1:2]) == (0, 0)
            content = dict.fromkeys(content, b"unfindable")
        if operation % 500 == 0:
            check(pool, held)
    for blocks in held:
        pool.release(blocks)
    check(pool, [])


def test_the_longest_unused_goes_first_and_the_end_of_a_sequence_before_its_beginning() -> None:
    pool = BlockPool(7)
    first, second = pool.allocate(3), pool.allocate(3)
    names = digests(list(range(6 * BLOCK)))
    pool.record(dict(zip([*first.tolist(), *second.tolist()], names, strict=True)))
    pool.release(second)
    pool.release(first)
    assert set(pool.allocate(4).tolist()) == {*second.tolist(), int(first[-1])}
    assert pool.known(names[:3]) == (2, 2)


def test_a_block_that_was_found_again_is_not_given_away() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    names = digests(list(range(2 * BLOCK)))
    pool.record(dict(zip(blocks.tolist(), names, strict=True)))
    pool.release(blocks)
    assert pool.find(names[:1]).tolist() == [blocks[0]]
    assert pool.allocate(1).tolist() == [blocks[1]]
    assert pool.available == 0


def test_a_digest_covers_all_before_it_and_the_weights() -> None:
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


def test_blocks_for_tokens() -> None:
    assert [blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
