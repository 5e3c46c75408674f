"""Blocks of the KV cache, allocated sixteen tokens at a time, and the prefix cache.

A block table lists the blocks with the keys and values of a sample. Several tables may share a block, which
has a reference count. Full blocks can be found by a hash of their tokens and all tokens before, chained from
block to block: this is the prefix cache. A block without references keeps its content until its memory is
needed; the least recently used block goes first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from perilune.models import memory

BLOCK = memory.BLOCK
"""Tokens per block."""

NULL_BLOCK = 0
"""The block that tables name where there is no block, and that padding is written to."""

Blocks = NDArray[np.int32]


class BlockPool:
    """Reference counts of blocks 1 .. count - 1, and the hashes of full blocks.

    The pool never touches the content of blocks; callers copy it.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.references = np.zeros(count, dtype=np.int32)
        # Allocated from the end, so that memory in use is reused first.
        self._free = list(range(count - 1, 0, -1))
        self._unused: dict[int, None] = {}  # cached and unreferenced, the least recently used first
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that `allocate` can return."""
        return len(self._free) + len(self._unused)

    @property
    def used(self) -> int:
        """Referenced blocks."""
        return self.count - 1 - self.available

    def allocate(self, count: int) -> Blocks:
        """`count` blocks with one reference each and arbitrary content; the caller checked `available`."""
        assert count <= self.available, "more blocks were allocated than are available"
        while len(self._free) < count:
            oldest = next(iter(self._unused))
            del self._unused[oldest]
            self._forget(oldest)
            self._free.append(oldest)
        start = len(self._free) - count
        blocks = np.array(self._free[start:][::-1], dtype=np.int32)
        del self._free[start:]
        self.references[blocks] = 1
        return blocks

    def share(self, blocks: Blocks, times: int = 1) -> None:
        """Add `times` references to each of the referenced `blocks`, which are distinct."""
        self.references[blocks] += times

    def release(self, blocks: Blocks) -> None:
        """Drop a reference to each of `blocks`, which are distinct except for the null block."""
        blocks = blocks[blocks != NULL_BLOCK]
        self.references[blocks] -= 1
        # The end of a sequence is least likely to be shared, so it is reused first.
        for block in blocks[self.references[blocks] == 0][::-1].tolist():
            if block in self._digest_of:
                self._unused[block] = None
            else:
                self._free.append(block)

    def find(self, digests: Iterable[bytes]) -> Blocks:
        """Blocks with the longest cached prefix of a sequence; each gets one more reference."""
        blocks = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
            if self.references[block] == 0:
                del self._unused[block]
            self.references[block] += 1
        return np.array(blocks, dtype=np.int32)

    def known(self, digests: Iterable[bytes]) -> tuple[int, int]:
        """How many blocks `find` would return, and how many of them are `available` now."""
        known = unused = 0
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            known += 1
            unused += self.references[block] == 0
        return known, int(unused)

    def has(self, digest: bytes) -> bool:
        """Whether a block has this digest."""
        return digest in self._block_of

    def record(self, digests: Mapping[int, bytes]) -> None:
        """Add referenced, full blocks to the prefix cache. Content that is already cached is not replaced."""
        for block, digest in digests.items():
            if digest not in self._block_of and block not in self._digest_of:
                self._block_of[digest] = block
                self._digest_of[block] = digest

    def forget_all(self) -> None:
        """Empty the prefix cache, because the content no longer fits the weights."""
        self._free += reversed(self._unused)
        self._unused.clear()
        self._digest_of.clear()
        self._block_of.clear()

    def _forget(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]


@lru_cache(maxsize=64)
def root_digest(version: int, adapter: int) -> bytes:
    """The first digest of the chains of a policy version and adapter, whose keys and values are their own."""
    return hashlib.blake2b(f"{version}/{adapter}".encode(), digest_size=16).digest()


def extend_digests(digests: list[bytes], root: bytes, tokens: Sequence[int] | NDArray[np.int32]) -> None:
    """Append the digests of the full blocks of `tokens` that `digests` does not have yet.

    Each digest covers the tokens of its block and all tokens before. The hash is collision resistant, so that
    no crafted prompt can read the blocks of another one.
    """
    done = len(digests)
    tail = np.ascontiguousarray(tokens[done * BLOCK : len(tokens) // BLOCK * BLOCK], dtype=np.int32).tobytes()
    parent = digests[-1] if digests else root
    for start in range(0, len(tail), 4 * BLOCK):
        parent = hashlib.blake2b(tail[start : start + 4 * BLOCK], digest_size=16, key=parent).digest()
        digests.append(parent)


def blocks_for(tokens: int) -> int:
    """Blocks needed for `tokens` tokens."""
    return -(-tokens // BLOCK)
