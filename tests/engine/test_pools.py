"""Block pools of full-attention and sliding-window layers: no leaks, and complete prefix hits."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from perilune.engine.blocks import BLOCK, NULL_BLOCK, Blocks
from perilune.engine.offload import OffloadSettings, OffloadStore
from perilune.engine.pools import BlockPools

WINDOW = 40


def name(position: int) -> bytes:
    return position.to_bytes(4, "big")


class Contents:
    """The content of each block, four bytes per block."""

    def __init__(self, of_pools: list[dict[int, bytes]]) -> None:
        self.of_pools = of_pools

    def read(self, index: int, blocks: Blocks) -> NDArray[np.uint8]:
        return np.stack([np.frombuffer(self.of_pools[index][block], np.uint8) for block in blocks.tolist()])

    def write(self, index: int, blocks: Blocks, content: NDArray[np.uint8]) -> None:
        self.of_pools[index] |= dict(zip(blocks.tolist(), map(bytes, content), strict=True))


@pytest.mark.parametrize("windows", [(None, WINDOW), (16, WINDOW), (None,)])
@pytest.mark.parametrize(("count", "offload"), [(12, 0), (80, 0), (12, 40), (24, 200)])
def test_random_operations_leak_no_block_and_find_correct_prefixes(
    windows: tuple[Any, ...], count: int, offload: int
) -> None:
    """Samples start with a cached prefix, grow, free blocks outside the window, fork and end."""
    rng = random.Random(count)
    content: list[dict[int, bytes]] = [{} for _ in windows]
    store = (
        OffloadStore(OffloadSettings(offload, offload, always=True), Contents(content)) if offload else None
    )
    pools = BlockPools([count] * len(windows), windows, store=store)
    samples: list[tuple[int, Blocks, int]] = []  # (text, block table, full columns)
    for operation in range(10_000):
        if offload and len(samples) > 4:  # force evictions
            pools.release(samples.pop(rng.randrange(len(samples)))[1])
        kind = rng.random()
        if kind < 0.2:
            text = rng.randrange(20 if offload else 3)
            chain = [name(1000 * text + column) for column in range(rng.randrange(12))]
            table = pools.acquire_prefix(chain)
            for of_window, behind, its in zip(
                table, pools.window_starts(table.shape[1] * BLOCK), content, strict=True
            ):
                assert not of_window[:behind].any()
                assert [its[block] for block in of_window[behind:].tolist()] == chain[behind : table.shape[1]]
            samples.append((text, table, table.shape[1]))
        elif kind < 0.6 and samples and pools.num_available:
            which = rng.randrange(len(samples))
            text, table, _ = samples[which]
            table = np.concatenate([table, pools.allocate(1)], axis=1)
            columns = table.shape[1]
            for index, (of_window, behind, its) in enumerate(
                zip(table, pools.window_starts(columns * BLOCK), content, strict=True)
            ):
                its[int(of_window[-1])] = name(1000 * text + columns - 1)
                pools.tree.release(index, of_window[:behind])
                of_window[:behind] = NULL_BLOCK
            pools.insert(table, [name(1000 * text + column) for column in range(columns)])
            samples[which] = text, table, columns
        elif kind < 0.7 and samples:
            text, table, columns = rng.choice(samples)
            pools.share(table, 1)
            samples.append((text, table.copy(), columns))
        elif kind < 0.75 and (blocks := pools.allocate_temporarily(rng.randrange(1, 2 * count))) is not None:
            for of_window, its in zip(blocks.tolist(), content, strict=True):
                for block in of_window:
                    its[block] = b"lent"
            pools.free_temporary(blocks)
        elif kind < 0.999 and samples:
            index = rng.randrange(len(samples))
            samples[index], samples[-1] = samples[-1], samples[index]
            pools.release(samples.pop()[1])
        elif kind >= 0.999:
            pools.clear()
            assert not pools.acquire_prefix([name(0)]).size
        if operation % 500 == 0:
            check(pools, samples)
    for _, table, _ in samples:
        pools.release(table)
    check(pools, [])
    assert pools.used_share == 0
    if store is not None:
        assert min(store.counters.loaded_from_memory, store.counters.loaded_from_disk) > 10
        assert store.counters.corrupt == 0
        assert store.memory_bytes <= offload
        assert store.disk_bytes <= offload


def check(pools: BlockPools, samples: list[tuple[int, Blocks, int]]) -> None:
    for index, pool in enumerate(pools.pools):
        references = np.zeros(pool.count, dtype=np.int64)
        for _, table, _ in samples:
            blocks = table[index][table[index] != NULL_BLOCK]
            references[blocks] += 1
        assert np.array_equal(pool.references, references)
        assert pool.num_used == (references > 0).sum()
        holders = pools.tree._node_of_block[index]
        assert pool.cached == sum(references[block] == 0 for block in holders)
        assert all(node.blocks[index] == block for block, node in holders.items())
        assert sorted([*holders, *pool._free]) == sorted({*holders, *pool._free})
    check_tree(pools)


def check_tree(pools: BlockPools) -> None:
    """Every end keeps its last windows; every cached full-attention block leads to an end."""
    tree = pools.tree
    ends = [*(node for node in tree._nodes.values() if node.heap_entry), *tree._forks]
    for index, window in enumerate(pools.windows):
        needed = Counter(id(node) for end in ends for node in tree._last_window(end, window or 10**6))
        unreferenced = {
            block: node
            for block, node in tree._node_of_block[index].items()
            if not pools.pools[index].references[block]
        }
        for block, node in unreferenced.items():
            if window is None:
                assert needed[id(node)], "a block that no request can use"
            else:
                assert node.pins[index] == needed[id(node)]
                assert (block in tree._spare[index]) == (not needed[id(node)])
    for node in tree._nodes.values():
        assert node.children == sum(child.parent is node for child in tree._nodes.values())


def test_prefix_is_found_only_when_its_last_window_is_cached() -> None:
    pools = BlockPools([20, 20], [None, WINDOW])
    table = pools.allocate(8)
    chain = [name(column) for column in range(8)]
    pools.insert(table, chain)
    pools.tree.release(1, table[1, :3])
    while pools.pools[1].num_available > 1:  # reuse the freed blocks
        pools.tree.allocate(1, 1)
    assert [pools.tree._nodes[digest].blocks[1] > 0 for digest in chain[:4]] == [True, False, False, True]
    # After the sixth block a query sees 39 tokens before it, in blocks 3, 4 and 5.
    assert [pools.acquire_prefix(chain[:length]).shape[1] for length in range(9)] == [
        0,
        1,
        1,
        1,
        1,
        1,
        6,
        7,
        8,
    ]
    found = pools.acquire_prefix(chain)
    assert found[0].tolist() == table[0].tolist()
    assert found[1].tolist() == [0] * 5 + table[1, 5:].tolist()


def test_has_room_counts_only_blocks_within_the_window() -> None:
    pools = BlockPools([65, 9], [None, WINDOW])
    assert pools.has_room([], 64 * BLOCK, 4 * BLOCK, 0)  # 104 tokens, in at most 8 blocks
    assert not pools.has_room([], 64 * BLOCK, 4 * BLOCK, 1)
    assert not pools.has_room([], 64 * BLOCK, 6 * BLOCK, 0)
    assert pools.has_room([], 7 * BLOCK, 6 * BLOCK, 1)
    assert not pools.has_room([], 65 * BLOCK, BLOCK, 0)


def test_window_layers_of_a_long_sample_keep_one_window() -> None:
    """10 full layers and 60 with a window of 128 hold 0.146 of the blocks of 70 full layers at 32k tokens."""
    columns, chunk = 32_768 // BLOCK, 64
    pools = BlockPools([columns + 1, 2 * chunk], [None, 128])
    table = np.zeros((2, 0), dtype=np.int32)
    for length in range(chunk, columns + 1, chunk):
        table = np.concatenate([table, pools.allocate(chunk)], axis=1)
        for index, behind in enumerate(pools.window_starts(length * BLOCK)):
            pools.tree.release(index, table[index, :behind])
            table[index, :behind] = NULL_BLOCK
    full, window = (pool.num_used for pool in pools.pools)
    assert (10 * full + 60 * window) / (70 * full) == pytest.approx(0.1462, abs=5e-5)
