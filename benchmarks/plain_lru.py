"""Block pools that evict their least recently released block: the baseline rule of the comparison."""

from collections.abc import Sequence

import numpy as np

from perilune.engine.blocks import BLOCK, NULL_BLOCK, Blocks


class PlainLru:
    """Block pools without a prefix tree, with the methods of `BlockPools` that a replay needs."""

    def __init__(self, counts: Sequence[int], windows: Sequence[int | None]) -> None:
        self.windows, self.tree = tuple(windows), self
        self._references = [np.zeros(count, dtype=np.int64) for count in counts]
        self._free = [list(range(count - 1, 0, -1)) for count in counts]
        self._unused: list[dict[int, None]] = [{} for _ in counts]
        self._block_of: list[dict[bytes, int]] = [{} for _ in counts]
        self._digest_of: list[dict[int, bytes]] = [{} for _ in counts]

    def window_starts(self, computed: int) -> list[int]:
        return [0 if window is None else max(0, computed - window + 1) // BLOCK for window in self.windows]

    def acquire_prefix(self, digests: Sequence[bytes]) -> Blocks:
        length = self._known(digests)
        table = np.full((len(self.windows), length), NULL_BLOCK, dtype=np.int32)
        for index, start in enumerate(self.window_starts(length * BLOCK)):
            for column in range(start, length):
                block = self._block_of[index][digests[column]]
                self._unused[index].pop(block, None)
                self._references[index][block] += 1
                table[index, column] = block
        return table

    def allocate(self, count: int) -> Blocks:
        return np.stack([self._take(index, count) for index in range(len(self.windows))])

    def insert(self, table: Blocks, digests: Sequence[bytes]) -> None:
        for index, blocks in enumerate(table.tolist()):
            for block, digest in zip(blocks, digests, strict=False):
                known = block in self._digest_of[index] or digest in self._block_of[index]
                if block != NULL_BLOCK and not known:
                    self._block_of[index][digest], self._digest_of[index][block] = block, digest

    def release(self, at: int | Blocks, blocks: Blocks | float = 0.0) -> None:
        """Release a table, or blocks of one pool."""
        if isinstance(blocks, np.ndarray):
            self._drop(int(at), blocks)  # type: ignore[arg-type]
            return
        for index, of_window in enumerate(at):  # type: ignore[arg-type]
            self._drop(index, of_window)

    def unusable(self) -> int:
        """Number of unreferenced cached blocks without a window that continue no known prefix."""
        return sum(self._references[0][block] == 0 for block in self._digest_of[0]) - self._usable()

    def _usable(self) -> int:
        """Blocks without a window in the longest usable prefix of each conversation."""
        conversations: dict[bytes, int] = {}
        for digest in self._block_of[0]:
            session, column = digest.split(b"/")
            conversations[session] = max(conversations.get(session, 0), int(column) + 1)
        shared = conversations.pop(b"0", 0)
        usable = 0
        for session, length in conversations.items():
            names = [b"%s/%d" % (b"0" if column < shared else session, column) for column in range(length)]
            usable += max(0, self._known(names) - shared)
        return usable + shared

    def _drop(self, index: int, blocks: Blocks) -> None:
        blocks = blocks[blocks != NULL_BLOCK]
        self._references[index][blocks] -= 1
        for block in blocks[self._references[index][blocks] == 0][::-1].tolist():
            if block in self._digest_of[index]:
                self._unused[index][block] = None
            else:
                self._free[index].append(block)

    def _take(self, index: int, count: int) -> Blocks:
        free, unused = self._free[index], self._unused[index]
        while len(free) < count:
            oldest = next(iter(unused))
            del unused[oldest]
            del self._block_of[index][self._digest_of[index].pop(oldest)]
            free.append(oldest)
        blocks = np.array([free.pop() for _ in range(count)], dtype=np.int32)
        self._references[index][blocks] = 1
        return blocks

    def _known(self, digests: Sequence[bytes]) -> int:
        lengths = np.arange(len(digests) + 1)
        possible = np.ones(len(lengths), dtype=np.bool_)
        for index, window in enumerate(self.windows):
            lacks = [False, *(digest not in self._block_of[index] for digest in digests)]
            begins = np.maximum.accumulate(np.where(lacks, lengths, 0))
            least = 0 if window is None else np.maximum(0, lengths * BLOCK - window + 1) // BLOCK
            possible &= begins <= least
        return int(np.flatnonzero(possible)[-1])
