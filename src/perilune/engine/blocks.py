"""Blocks: the memory of the KV cache, handed out sixteen tokens at a time.

A sample's keys and values lie in blocks that its block table lists; a block may be in many tables, and has a
reference count. A full block whose content is known (the tokens in it and all before it) can be found again
by a hash, chained from block to block: that is the prefix cache. A block that nobody references any more
keeps its content until room is needed; the one longest unused goes first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from perilune.models import memory

BLOCK = memory.BLOCK
"""Tokens a block."""

NULL_BLOCK = 0
"""Belongs to nobody: tables point to it where there is no block, and padding is written into it."""

Blocks = NDArray[np.int32]


class BlockPool:
    """Reference counts of the blocks 1 .. count - 1, and where full blocks with a known content are.

    Nothing here touches the content: copying is up to whoever asks for it.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.references = np.zeros(count, dtype=np.int32)
        # Taken from the end: memory that was touched before is taken again first.
        self._free = list(range(count - 1, 0, -1))
        self._unused: dict[int, None] = {}  # cached and unreferenced; the longest unused first
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that `take` could hand out."""
        return len(self._free) + len(self._unused)

    @property
    def used(self) -> int:
        """Blocks that are referenced."""
        return self.count - 1 - self.available

    def allocate(self, count: int) -> Blocks:
        """`count` blocks with one reference each and arbitrary content; the caller checked `available`."""
        assert count <= self.available, "blocks taken without asking whether there are any"
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
        """Drop a reference of each of `blocks`, which are distinct; the null block may be repeated."""
        blocks = blocks[blocks != NULL_BLOCK]
        self.references[blocks] -= 1
        # The end of a sequence is of least use to others: it becomes the first to be taken again.
        for block in blocks[self.references[blocks] == 0][::-1].tolist():
            if block in self._digest_of:
                self._unused[block] = None
            else:
                self._free.append(block)

    def find(self, digests: Iterable[bytes]) -> Blocks:
        """Blocks that hold the longest known beginning of a sequence, one reference added to each."""
        found = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
            if self.references[block] == 0:
                del self._unused[block]
            self.references[block] += 1
        return np.array(found, dtype=np.int32)

    def known(self, digests: Iterable[bytes]) -> tuple[int, int]:
        """How many blocks `find` would return, and how many of them count as `available` now."""
        found = unused = 0
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found += 1
            unused += self.references[block] == 0
        return found, int(unused)

    def has(self, digest: bytes) -> bool:
        """Whether `find` would return a block for it."""
        return digest in self._block_of

    def record(self, digests: Mapping[int, bytes]) -> None:
        """Make referenced, full blocks findable; a content that is findable already stays where it is."""
        for block, digest in digests.items():
            if digest not in self._block_of and block not in self._digest_of:
                self._block_of[digest] = block
                self._digest_of[block] = digest

    def forget_all(self) -> None:
        """Let no block be found any more: what they hold no longer fits the weights."""
        self._free += reversed(self._unused)
        self._unused.clear()
        self._digest_of.clear()
        self._block_of.clear()

    def _forget(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]


@lru_cache(maxsize=64)
def root_digest(version: int, adapter: int) -> bytes:
    """Where the chains of one policy version begin: other weights make other keys and values."""
    return hashlib.blake2b(f"{version}/{adapter}".encode(), digest_size=16).digest()


def extend_digests(digests: list[bytes], root: bytes, tokens: Sequence[int] | NDArray[np.int32]) -> None:
    """Append the digests of the full blocks of `tokens` that `digests` does not have yet.

    Each covers its own tokens and all before. Collision resistant, so that nobody can craft a prompt that
    reads another's blocks.
    """
    done = len(digests)
    tail = np.ascontiguousarray(tokens[done * BLOCK : len(tokens) // BLOCK * BLOCK], dtype=np.int32).tobytes()
    parent = digests[-1] if digests else root
    for start in range(0, len(tail), 4 * BLOCK):
        parent = hashlib.blake2b(tail[start : start + 4 * BLOCK], digest_size=16, key=parent).digest()
        digests.append(parent)


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK)
