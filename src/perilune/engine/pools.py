"""Block pools, one for each window size among the layers.

Layers without a window cache the whole sequence of a sample. Layers with a window cache only the tokens that
the next query sees. So a sample has one block table per window size, and each table has a pool of its own.
Column j of every table stands for the same tokens; outside the window it holds the null block.

W is the number of window sizes, as in `DecoderConfig.distinct_windows`.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from perilune.engine.blocks import BLOCK, NULL_BLOCK, BlockPool, Blocks, blocks_for, window_start
from perilune.engine.offload import OffloadStore
from perilune.engine.prefix_tree import PrefixTree
from perilune.engine.sequences import Rows, Sequences
from perilune.models.config.decoder_config import STATE_WINDOW
from perilune.models.memory import MAX_STATE_TOKENS, max_blocks_touched


class BlockPools:
    """The pools of all window sizes, which allocate and release columns of all tables together.

    Args:
        counts: number of blocks for each window size, including the null block.
        windows: tokens that a query sees, including its own; None for all preceding tokens.
        clock: returns seconds; used for sessions with an announced return.
        store: receives the evicted blocks.
        block_size: tokens per block.

    Attributes:
        max_chunk_tokens: maximum number of tokens of one sequence in a step; limited by linear attention.
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
        tree = self.tree = PrefixTree(self.windows, self.pools, clock, store, block_size)
        self.max_chunk_tokens = MAX_STATE_TOKENS if STATE_WINDOW in self.windows else 1 << 31
        self.window_starts, self.acquire_prefix = tree.window_starts, tree.acquire_prefix
        self.insert, self.clear = tree.insert, tree.clear

    @property
    def available(self) -> tuple[int, ...]:
        """Number of blocks of each pool that `allocate` can return."""
        return tuple(pool.num_available for pool in self.pools)

    @property
    def num_available(self) -> int:
        """Number of columns that `allocate` can return."""
        return min(self.available)

    @property
    def used_share(self) -> float:
        """Share of referenced blocks in the fullest pool."""
        return max(pool.num_used / (pool.count - 1) for pool in self.pools)

    def allocate(self, count: int) -> Blocks:
        """Allocate blocks int32[W, count] with one reference each."""
        return np.stack([self.tree.allocate(index, count) for index in range(len(self.pools))])

    def allocate_temporarily(self, count: int) -> Blocks | None:
        """Return int32[W, count] blocks for scoring, or None if too few are available.

        A pool with fewer blocks repeats them in turn, because blocks outside the window may be overwritten.
        """
        sizes = [min(count, pool.count - 1) for pool in self.pools]
        if any(size > pool.num_available for size, pool in zip(sizes, self.pools, strict=True)):
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
        """Remove a reference from each of int32[W, C].

        Args:
            returns_in: seconds until a request is expected that continues these tokens; 0 if unknown.
        """
        for index, of_window in enumerate(blocks):
            self.tree.release(index, of_window, returns_in)

    def has_room(self, digests: Sequence[bytes], length: int, chunk_tokens: int, spare: int) -> bool:
        """Return whether a sample of `length` tokens fits and leaves `spare` blocks available.

        Args:
            digests: of the sample's full blocks, some of which may be cached.
            chunk_tokens: maximum number of its tokens that one step computes.
        """
        path = self.tree.match_nodes(digests)
        starts = self.window_starts(len(path) * self.block_size)
        for index, (window, start, pool) in enumerate(zip(self.windows, starts, self.pools, strict=True)):
            need = blocks_for(length, self.block_size) - len(path)
            if window is not None:
                tokens = window + min(chunk_tokens, self.max_chunk_tokens)
                need = min(need, max_blocks_touched(tokens, self.block_size))
            unused = sum(not pool.references[node.blocks[index]] for node in path[start:] if node is not None)
            if need + spare > pool.num_available - unused:
                return False
        return True

    def release_outside_windows(self, sequences: Sequences, rows: Rows) -> None:
        """Release the blocks of `rows` that no later query sees; their columns get the null block."""
        tables = zip(self.windows, sequences.blocks, sequences.released_columns, strict=True)
        for index, (window, blocks, released) in enumerate(tables):
            if window is None:
                continue
            starts = window_start(window, sequences.computed[rows], self.block_size)
            due = np.flatnonzero(starts > released[rows])
            for row, start in zip(rows[due].tolist(), starts[due].tolist(), strict=True):
                self.tree.release(index, blocks[row, released[row] : start])
                blocks[row, released[row] : start] = NULL_BLOCK
                released[row] = start

    def count_cached_columns(self, digests: Sequence[bytes]) -> int:
        """Return the number of columns of the longest usable cached prefix."""
        return len(self.tree.match_nodes(digests))
