"""Blocks of the KV cache: the unit of allocation, sixteen tokens in most runners.

A block table lists the blocks with the keys and values of a sample. Several tables may share a block, so each
block has a reference count. `prefix_tree` finds full blocks by the hash of their tokens and all preceding
tokens, and chooses which unreferenced blocks are evicted first.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from perilune.models import memory

BLOCK = memory.BLOCK
"""Tokens per block, unless the runner's kernels need another size."""

NULL_BLOCK = 0
"""The entry of a block table where there is no block. The keys and values of padding are written to it."""

Blocks = NDArray[np.int32]


class BlockPool:
    """The reference counts of blocks 1 .. count - 1, and the list of free blocks.

    The pool knows only block numbers; callers copy the content of blocks.

    Attributes:
        references: int32[count].
        cached: number of unreferenced blocks in the prefix tree.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.references = np.zeros(count, dtype=np.int32)
        self.cached = 0
        # Blocks are taken from the end, so that recently freed memory is reused first.
        self._free = list(range(count - 1, 0, -1))

    @property
    def num_free(self) -> int:
        """Number of blocks whose content is not needed."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Number of blocks without references."""
        return len(self._free) + self.cached

    @property
    def num_used(self) -> int:
        """Number of referenced blocks."""
        return self.count - 1 - self.num_available

    def allocate(self, count: int) -> Blocks:
        """Return `count` blocks of arbitrary content with one reference each. Callers check `num_free`."""
        assert count <= len(self._free), "more blocks were taken than are free"
        start = len(self._free) - count
        blocks = np.array(self._free[start:][::-1], dtype=np.int32)
        del self._free[start:]
        self.references[blocks] = 1
        return blocks

    def share(self, blocks: Blocks, times: int = 1) -> None:
        """Add `times` references to each of the referenced `blocks`, which are distinct."""
        self.references[blocks] += times

    def release(self, blocks: Blocks) -> list[int]:
        """Remove a reference from each of `blocks`, which are distinct except for the null block.

        Return the blocks that are now unreferenced, the last of `blocks` first. They are neither free nor
        cached yet.
        """
        blocks = blocks[blocks != NULL_BLOCK]
        self.references[blocks] -= 1
        unreferenced: list[int] = blocks[self.references[blocks] == 0][::-1].tolist()
        return unreferenced

    def free(self, block: int) -> None:
        """Make an unreferenced block free."""
        self._free.append(block)


@lru_cache(maxsize=64)
def root_digest(version: int, adapter: int) -> bytes:
    """Return the digest before the first block, so that policy versions and adapters never share blocks."""
    return hashlib.blake2b(f"{version}/{adapter}".encode(), digest_size=16).digest()


def extend_digests(
    digests: list[bytes], root: bytes, tokens: Sequence[int] | NDArray[np.int32], size: int = BLOCK
) -> None:
    """Append the digests of the full blocks of `tokens` that `digests` does not have yet.

    Each digest covers the tokens of its block and all tokens before. The hash is collision resistant, so no
    crafted prompt can match the blocks of another prompt.
    """
    covered = len(digests)
    tail = np.ascontiguousarray(tokens[covered * size : len(tokens) // size * size], dtype=np.int32).tobytes()
    parent = digests[-1] if digests else root
    for start in range(0, len(tail), 4 * size):
        parent = hashlib.blake2b(tail[start : start + 4 * size], digest_size=16, key=parent).digest()
        digests.append(parent)


def window_start(window: int | None, computed: NDArray[np.int64], size: int = BLOCK) -> NDArray[np.int64]:
    """Return the first column that a query at each position `computed` sees; 0 without a window."""
    if window is None:
        return np.zeros_like(computed)
    return np.maximum(0, computed - window + 1) // size


def blocks_for(tokens: int, size: int = BLOCK) -> int:
    """Return the number of blocks of `size` tokens that `tokens` tokens need."""
    return -(-tokens // size)
