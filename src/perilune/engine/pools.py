"""Block pools, one for each window size among the layers.

Layers without a window cache the whole sequence of a sample, layers with a window only what its next query
sees. So a sample has one block table per window size, with blocks from separate pools. Column j of every
table stands for the same sixteen tokens; behind the window it names the null block.

W windows, as in `DecoderConfig.distinct_windows`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perilune.engine.blocks import BLOCK, NULL_BLOCK, BlockPool, Blocks, blocks_for
from perilune.engine.sequences import Rows, Sequences
from perilune.models.memory import blocks_in

Window = int | None


class BlockPools:
    """The pools of all windows. They allocate and release a column of all tables together.

    Args:
        counts: number of blocks for each window, including the null block.
        windows: tokens that a query sees, including its own; None for all before it.
    """

    def __init__(self, counts: Sequence[int], windows: Sequence[Window] = (None,)) -> None:
        self.windows = tuple(windows)
        self.pools = tuple(BlockPool(count) for count in counts)
        assert len(self.pools) == len(self.windows), "one count for each window"

    @property
    def available(self) -> int:
        """Columns that `allocate` can return."""
        return min(pool.available for pool in self.pools)

    @property
    def use(self) -> float:
        """Share of blocks that are referenced, in the fullest pool."""
        return max(pool.used / (pool.count - 1) for pool in self.pools)

    def allocate(self, count: int) -> Blocks:
        """int32[W, count], with one reference each."""
        return np.stack([pool.allocate(count) for pool in self.pools])

    def allocate_temporarily(self, count: int) -> Blocks | None:
        """int32[W, count] blocks for scoring, or None if they are not free now.

        A smaller pool repeats its blocks in turn, because blocks behind the window may be overwritten.
        """
        sizes = [min(count, pool.count - 1) for pool in self.pools]
        if any(size > pool.available for size, pool in zip(sizes, self.pools, strict=True)):
            return None
        allocated = (pool.allocate(size) for size, pool in zip(sizes, self.pools, strict=True))
        return np.stack([np.resize(blocks, count) for blocks in allocated])

    def free_temporary(self, blocks: Blocks) -> None:
        """Release the blocks of `allocate_temporarily`."""
        for pool, of_window in zip(self.pools, blocks, strict=True):
            pool.release(np.unique(of_window))

    def share(self, blocks: Blocks, times: int) -> None:
        """Add `times` references to each of int32[W, C], except the null block."""
        for pool, of_window in zip(self.pools, blocks, strict=True):
            pool.share(of_window[of_window != NULL_BLOCK], times)

    def release(self, blocks: Blocks) -> None:
        """Drop a reference to each of int32[W, C]."""
        for pool, of_window in zip(self.pools, blocks, strict=True):
            pool.release(of_window)

    def find(self, digests: Sequence[bytes]) -> Blocks:
        """int32[W, C] of the longest cached prefix, with one more reference each; null behind a window."""
        length = self.known_length(digests)
        columns = np.full((len(self.pools), length), NULL_BLOCK, dtype=np.int32)
        for row, start, pool in zip(columns, self.behind(length * BLOCK), self.pools, strict=True):
            row[start:] = pool.find(digests[start:length])
        return columns

    def has_room(self, digests: Sequence[bytes], length: int, most_fed: int, spare: int) -> bool:
        """Whether `length` tokens with the given `digests` fit when `most_fed` are computed at once.

        `spare` blocks must remain.
        """
        known = self.known_length(digests)
        for window, start, pool in zip(self.windows, self.behind(known * BLOCK), self.pools, strict=True):
            need = blocks_for(length) - known
            if window is not None:
                need = min(need, blocks_in(window + most_fed))
            _, unused = pool.known(digests[start:known])
            if need + spare > pool.available - unused:
                return False
        return True

    def behind(self, computed: int) -> list[int]:
        """For each window, the number of columns that no query from position `computed` on sees."""
        return [0 if window is None else max(0, computed - window + 1) // BLOCK for window in self.windows]

    def leave_behind(self, sequences: Sequences, rows: Rows) -> None:
        """Release the blocks that no later query sees, and put the null block into the tables."""
        tables = zip(self.windows, self.pools, sequences.blocks, sequences.left_behind, strict=True)
        for window, pool, blocks, left in tables:
            if window is None:
                continue
            behind = np.maximum(0, sequences.computed[rows] - window + 1) // BLOCK
            due = np.flatnonzero(behind > left[rows])
            for row, end in zip(rows[due].tolist(), behind[due].tolist(), strict=True):
                pool.release(blocks[row, left[row] : end])
                blocks[row, left[row] : end] = NULL_BLOCK
                left[row] = end

    def record(self, table: Blocks, digests: Sequence[bytes]) -> None:
        """Add the full blocks of a table int32[W, C] to the prefix cache under the digests of its columns."""
        for pool, of_window in zip(self.pools, table, strict=True):
            held = zip(of_window.tolist(), digests, strict=False)
            pool.record({block: digest for block, digest in held if block != NULL_BLOCK})

    def forget_all(self) -> None:
        """Empty the prefix cache."""
        for pool in self.pools:
            pool.forget_all()

    def known_length(self, digests: Sequence[bytes]) -> int:
        """Columns of the longest cached prefix for which every layer has all that the next query sees."""
        lengths = np.arange(len(digests) + 1)
        possible = np.ones(len(lengths), dtype=np.bool_)
        for window, pool in zip(self.windows, self.pools, strict=True):
            if window is None:
                possible &= lengths <= pool.known(digests)[0]
            else:
                # For each length, the start of the unbroken run of cached blocks that ends there.
                missing = np.array([0, *(not pool.has(digest) for digest in digests)], dtype=np.bool_)
                begins = np.maximum.accumulate(np.where(missing, lengths, 0))
                possible &= begins <= np.maximum(0, lengths * BLOCK - window + 1) // BLOCK
        return int(np.flatnonzero(possible)[-1])
