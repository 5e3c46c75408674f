"""Block pools, one for each window size among the layers.

Layers without a window cache the whole sequence of a sample, layers with a window only what its next query
sees. So a sample has one block table per window size, with blocks from separate pools. Column j of every
table stands for the same sixteen tokens; behind the window it names the null block.

W windows, as in `DecoderConfig.distinct_windows`.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from perilune.engine.blocks import BLOCK, NULL_BLOCK, BlockPool, Blocks, blocks_for, columns_behind
from perilune.engine.offload import OffloadStore
from perilune.engine.prefix_tree import PrefixTree
from perilune.engine.sequences import Rows, Sequences
from perilune.models.config.decoder_config import STATE_WINDOW
from perilune.models.memory import STATE_TOKENS, blocks_in


class BlockPools:
    """The pools of all windows. They allocate and release a column of all tables together.

    Args:
        counts: number of blocks for each window, including the null block.
        windows: tokens that a query sees, including its own; None for all before it.
        clock: seconds, for sessions whose return is announced.
        store: takes the evicted blocks.
        block_size: tokens per block.

    Attributes:
        most_at_once: most tokens of one sequence in a step.
    """

    def __init__(
        self,
        counts: Sequence[int],
        windows: Sequence[int | None] = (None,),
        clock: Callable[[], float] = time.monotonic,
        store: OffloadStore | None = None,
        block_size: int = BLOCK,
    ) -> None:
        self.windows, self.block_size = tuple(windows), block_size
        self.pools = tuple(BlockPool(count) for count in counts)
        assert len(self.pools) == len(self.windows), "one count for each window"
        self.tree = PrefixTree(self.windows, self.pools, clock, store, block_size)
        self.most_at_once = STATE_TOKENS if STATE_WINDOW in self.windows else 1 << 31
        self.behind, self.find, self.record = self.tree.behind, self.tree.find, self.tree.record
        self.forget_all = self.tree.forget_all

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
        return np.stack([self.tree.allocate(index, count) for index in range(len(self.pools))])

    def allocate_temporarily(self, count: int) -> Blocks | None:
        """int32[W, count] blocks for scoring, or None if they are not free now.

        A smaller pool repeats its blocks in turn, because blocks behind the window may be overwritten.
        """
        sizes = [min(count, pool.count - 1) for pool in self.pools]
        if any(size > pool.available for size, pool in zip(sizes, self.pools, strict=True)):
            return None
        allocated = (self.tree.allocate(index, size) for index, size in enumerate(sizes))
        return np.stack([np.resize(blocks, count) for blocks in allocated])

    def free_temporary(self, blocks: Blocks) -> None:
        """Release the blocks of `allocate_temporarily`."""
        for index, of_window in enumerate(blocks):
            self.tree.release(index, np.unique(of_window))

    def share(self, blocks: Blocks, times: int) -> None:
        """Add `times` references to each of int32[W, C], except the null block."""
        for pool, of_window in zip(self.pools, blocks, strict=True):
            pool.share(of_window[of_window != NULL_BLOCK], times)

    def release(self, blocks: Blocks, returns_in: float = 0.0) -> None:
        """Drop a reference to each of int32[W, C].

        Args:
            returns_in: seconds until a request is expected that continues these tokens; 0 if unknown.
        """
        for index, of_window in enumerate(blocks):
            self.tree.release(index, of_window, returns_in)

    def has_room(self, digests: Sequence[bytes], length: int, most_fed: int, spare: int) -> bool:
        """Whether `length` tokens with the given `digests` fit when `most_fed` are computed at once.

        `spare` blocks must remain.
        """
        path = self.tree.path(digests)
        starts = self.behind(len(path) * self.block_size)
        for index, (window, start, pool) in enumerate(zip(self.windows, starts, self.pools, strict=True)):
            need = blocks_for(length, self.block_size) - len(path)
            if window is not None:
                need = min(need, blocks_in(window + min(most_fed, self.most_at_once), self.block_size))
            unused = sum(not pool.references[node.blocks[index]] for node in path[start:] if node is not None)
            if need + spare > pool.available - unused:
                return False
        return True

    def leave_behind(self, sequences: Sequences, rows: Rows) -> None:
        """Release the blocks that no later query sees, and put the null block into the tables."""
        tables = zip(self.windows, sequences.blocks, sequences.left_behind, strict=True)
        for index, (window, blocks, left) in enumerate(tables):
            if window is None:
                continue
            behind = columns_behind(window, sequences.computed[rows], self.block_size)
            due = np.flatnonzero(behind > left[rows])
            for row, end in zip(rows[due].tolist(), behind[due].tolist(), strict=True):
                self.tree.release(index, blocks[row, left[row] : end])
                blocks[row, left[row] : end] = NULL_BLOCK
                left[row] = end

    def known_length(self, digests: Sequence[bytes]) -> int:
        """Columns of the longest cached prefix for which every layer has all that the next query sees."""
        return len(self.tree.path(digests))
