"""Eviction order of the prefix cache: least recently used first, from the end, in whole branches."""

import numpy as np

from perilune.engine.blocks import BLOCK, Blocks
from perilune.engine.pools import BlockPools

WINDOW = 2 * BLOCK


class Cache:
    """Sequences of blocks named by letters, with a clock."""

    def __init__(self, *counts: int) -> None:
        self.now = 100.0
        self.pools = BlockPools(counts, (None, WINDOW)[: len(counts)], lambda: self.now)

    def run(self, text: str, returns_in: float = 0.0) -> int:
        """Compute `text` after its cached prefix; return the number of cached columns."""
        table, chain = self.begin(text)
        cached = table.shape[1]
        for column in range(cached, len(text)):
            table = np.concatenate([table, self.pools.allocate(1)], axis=1)
            self.leave(table, column + 1, chain)
        self.pools.insert(table, chain)
        self.pools.release(table, returns_in)
        return cached

    def leave(self, table: Blocks, columns: int, chain: list[bytes]) -> None:
        self.pools.insert(table, chain[:columns])
        for index, behind in enumerate(self.pools.window_starts(columns * BLOCK)):
            self.pools.tree.release(index, table[index, :behind])
            table[index, :behind] = 0

    def begin(self, text: str) -> tuple[Blocks, list[bytes]]:
        chain = self.names(text)
        return self.pools.acquire_prefix(chain), chain

    def cached(self, text: str) -> int:
        return self.pools.count_cached_columns(self.names(text))

    @staticmethod
    def names(text: str) -> list[bytes]:
        return [text[: column + 1].encode() for column in range(len(text))]


def test_eviction_is_least_recently_used_from_the_end_of_a_sequence() -> None:
    cache = Cache(1 + 8)
    cache.run("abcd")
    cache.run("wxyz")
    cache.run("ab")  # refreshes the first two blocks only
    assert cache.run("mn") == 0
    assert [cache.cached(text) for text in ("abcd", "wxyz", "mn")] == [2, 4, 2]
    cache.run("opq")
    assert [cache.cached(text) for text in ("abcd", "wxyz", "mn", "opq")] == [2, 1, 2, 3]


def test_referenced_blocks_are_never_evicted() -> None:
    cache = Cache(1 + 4)
    cache.run("abc")
    table, _ = cache.begin("ab")
    taken = cache.pools.allocate(2)
    assert not set(taken[0].tolist()) & set(table[0].tolist())
    assert cache.pools.num_available == 0


def test_equal_blocks_are_stored_once() -> None:
    cache = Cache(1 + 8)
    tables = [cache.pools.allocate(3) for _ in range(2)]
    for table in tables:
        cache.pools.insert(table, cache.names("abc"))
    assert tables[0].tolist() == tables[1].tolist()
    assert cache.pools.pools[0].num_used == 3


def test_windowed_pool_evicts_blocks_that_no_request_can_reuse_first() -> None:
    """Plain LRU would evict the last window of the older session to keep the start of the newer one."""
    cache = Cache(1 + 40, 1 + 7)
    cache.run("abcdef")
    cache.run("ABCDEFGHIJ")
    assert cache.run("abcdefg") == 6
    assert cache.run("ABCDEFGHIJK") == 10


def test_evicting_the_last_window_evicts_its_whole_branch() -> None:
    cache = Cache(1 + 40, 1 + 7)
    for name in "abcd":
        cache.run(name * 8)
    assert [cache.cached(name * 8) for name in "abcd"] == [0, 8, 8, 8]
    assert cache.pools.pools[0].cached == 24  # the first sequence is gone
    assert cache.pools.pools[0].num_free == 16


def test_shared_prefix_stays_cached_while_sessions_extend_its_branches() -> None:
    cache = Cache(1 + 80, 1 + 10)
    cache.run("system" + "a" * 8)
    found = [cache.run("system" + name * 8) for name in "bcdef"]
    assert found[1:] == [6] * 4  # the second request shows where the shared prefix ends


def test_session_with_expected_return_is_kept_until_overdue() -> None:
    cache = Cache(1 + 8)
    cache.run("abcd", returns_in=30)
    cache.run("wxyz")
    cache.run("mn")
    assert [cache.cached(text) for text in ("abcd", "wxyz", "mn")] == [4, 2, 2]
    cache.now += 91
    cache.run("op")
    assert [cache.cached(text) for text in ("abcd", "wxyz", "mn", "op")] == [2, 2, 2, 2]


def test_session_with_latest_expected_return_is_evicted_first() -> None:
    cache = Cache(1 + 6)
    cache.run("ab", returns_in=5)
    cache.run("cd", returns_in=50)
    cache.run("ef", returns_in=20)
    cache.run("gh")
    assert [cache.cached(text) for text in ("ab", "cd", "ef", "gh")] == [2, 0, 2, 2]
