"""Which blocks the prefix cache gives up first: ends of what was used least recently, and whole branches."""

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
        """Compute `text` after what is cached of it, and return the number of columns that were."""
        table, chain = self.begin(text)
        cached = table.shape[1]
        for column in range(cached, len(text)):
            table = np.concatenate([table, self.pools.allocate(1)], axis=1)
            self.leave(table, column + 1, chain)
        self.pools.record(table, chain)
        self.pools.release(table, returns_in)
        return cached

    def leave(self, table: Blocks, columns: int, chain: list[bytes]) -> None:
        self.pools.record(table, chain[:columns])
        for index, behind in enumerate(self.pools.behind(columns * BLOCK)):
            self.pools.tree.release(index, table[index, :behind])
            table[index, :behind] = 0

    def begin(self, text: str) -> tuple[Blocks, list[bytes]]:
        chain = self.names(text)
        return self.pools.find(chain), chain

    def cached(self, text: str) -> int:
        return self.pools.known_length(self.names(text))

    @staticmethod
    def names(text: str) -> list[bytes]:
        return [text[: column + 1].encode() for column in range(len(text))]


def test_the_least_recently_used_goes_first_and_the_end_of_a_sequence_before_its_beginning() -> None:
    cache = Cache(1 + 8)
    cache.run("abcd")
    cache.run("wxyz")
    cache.run("ab")  # used again, without its end
    assert cache.run("mn") == 0
    assert [cache.cached(text) for text in ("abcd", "wxyz", "mn")] == [2, 4, 2]
    cache.run("opq")
    assert [cache.cached(text) for text in ("abcd", "wxyz", "mn", "opq")] == [2, 1, 2, 3]


def test_a_referenced_block_is_never_given_away() -> None:
    cache = Cache(1 + 4)
    cache.run("abc")
    table, _ = cache.begin("ab")
    taken = cache.pools.allocate(2)
    assert not set(taken[0].tolist()) & set(table[0].tolist())
    assert cache.pools.available == 0


def test_equal_blocks_are_kept_once() -> None:
    cache = Cache(1 + 8)
    tables = [cache.pools.allocate(3) for _ in range(2)]
    for table in tables:
        cache.pools.record(table, cache.names("abc"))
    assert tables[0].tolist() == tables[1].tolist()
    assert cache.pools.pools[0].used == 3


def test_a_window_gives_up_what_no_request_continues_first() -> None:
    """Plain LRU would give up the last window of the older session for the beginning of the newer one."""
    cache = Cache(1 + 40, 1 + 7)
    cache.run("abcdef")
    cache.run("ABCDEFGHIJ")
    assert cache.run("abcdefg") == 6
    assert cache.run("ABCDEFGHIJK") == 10


def test_a_branch_goes_with_its_last_window() -> None:
    cache = Cache(1 + 40, 1 + 7)
    for name in "abcd":
        cache.run(name * 8)
    assert [cache.cached(name * 8) for name in "abcd"] == [0, 8, 8, 8]
    assert cache.pools.pools[0].cached == 24  # nothing is left of the first one
    assert cache.pools.pools[0].free == 16


def test_a_common_beginning_stays_while_sessions_continue_it() -> None:
    cache = Cache(1 + 80, 1 + 10)
    cache.run("system" + "a" * 8)
    found = [cache.run("system" + name * 8) for name in "bcdef"]
    assert found[1:] == [6] * 4  # the second request shows where requests part


def test_an_announced_session_stays_until_it_is_late() -> None:
    cache = Cache(1 + 8)
    cache.run("abcd", returns_in=30)
    cache.run("wxyz")
    cache.run("mn")
    assert [cache.cached(text) for text in ("abcd", "wxyz", "mn")] == [4, 2, 2]
    cache.now += 91
    cache.run("op")
    assert [cache.cached(text) for text in ("abcd", "wxyz", "mn", "op")] == [2, 2, 2, 2]


def test_of_announced_sessions_the_one_that_returns_last_goes_first() -> None:
    cache = Cache(1 + 6)
    cache.run("ab", returns_in=5)
    cache.run("cd", returns_in=50)
    cache.run("ef", returns_in=20)
    cache.run("gh")
    assert [cache.cached(text) for text in ("ab", "cd", "ef", "gh")] == [2, 0, 2, 2]
