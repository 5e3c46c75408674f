"""KV offloading: evicted blocks go to host memory, and from there to a file.

A later request loads them if that is faster than computing them. The bytes are those of the cache, so a
sample is the same with and without offloading. Every block has a checksum; one that does not match is
computed anew. The file has no name, so nothing of it is left when the process ends.
"""

import os
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perilune.engine.blocks import BLOCK, Blocks

Bytes = NDArray[np.uint8]
Key = tuple[int, bytes]
"""Index of the pool, and digest of the block."""

_SMOOTHING = 0.2  # weight of the newest measurement in a rate
_RETRY = 64  # a transfer that was too slow is tried again after this many refusals


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """Where blocks go.

    Attributes:
        memory: bytes in host memory.
        disk: bytes in a file.
        folder: folder of the file; None for the system's folder of temporary files.
        always: load blocks even where computing them is faster.
    """

    memory: int
    disk: int = 0
    folder: Path | None = None
    always: bool = False


class BlockContents(Protocol):
    """Reads and writes the content of cache blocks."""

    def read(self, index: int, blocks: Blocks) -> Bytes:
        """uint8[C, bytes] of the blocks int32[C] of pool `index`."""

    def write(self, index: int, blocks: Blocks, content: Bytes) -> None:
        """Overwrite the blocks int32[C] of pool `index`."""


@dataclass(slots=True)
class OffloadCounters:
    """Counts since the store was created, in blocks.

    Attributes:
        stored: written to memory.
        spilled: moved from memory to disk.
        dropped: removed for lack of room.
        loaded_from_memory, loaded_from_disk: loaded into the cache.
        corrupt: with a wrong checksum, or unreadable.
        refused: not loaded, because computing is faster.
        disk_failures: 1 once the disk could not be written; it is not written again.
    """

    stored: int = 0
    spilled: int = 0
    dropped: int = 0
    loaded_from_memory: int = 0
    loaded_from_disk: int = 0
    corrupt: int = 0
    refused: int = 0
    disk_failures: int = 0


@dataclass(slots=True)
class _Held:
    """A block in the store: its checksum, and its bytes or its place in the file."""

    checksum: int
    size: int
    content: Bytes | None
    place: int = -1


class OffloadStore:
    """Blocks outside the pools, the least recently used first.

    Args:
        contents: the cache.

    Attributes:
        compute_seconds: seconds to compute a token of a prompt; 0 until measured.
        load_seconds: seconds to load a byte.
        disk_failure: why the disk is no longer written; "" while it is.
    """

    def __init__(self, settings: OffloadSettings, contents: BlockContents) -> None:
        self.settings, self._contents = settings, contents
        self._held: dict[Key, _Held] = {}  # in memory and on disk, the least recently used first
        self._in_memory: dict[Key, None] = {}
        self._memory = self._disk = 0
        self._file = tempfile.TemporaryFile(dir=settings.folder) if settings.disk else None  # noqa: SIM115
        self._free_places: dict[int, list[int]] = {}  # by size
        self._end = 0
        self._refusals = 0
        self._reading = 0.0  # seconds of reads since the last write
        self.counters = OffloadCounters()
        self.compute_seconds = 0.0
        self.load_seconds = 1e-9
        self.disk_failure = ""

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def attach(self, contents: BlockContents) -> None:
        """Use another cache from now on."""
        self._contents = contents

    def forget_all(self) -> None:
        """Empty the store, because the weights have changed."""
        for kept in (self._held, self._in_memory, self._free_places):
            kept.clear()
        self._memory = self._disk = self._end = 0

    def put(self, index: int, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Store blocks of pool `index`, first those that will be needed least."""
        wanted = []
        for block, digest in zip(blocks, digests, strict=True):
            if (index, digest) in self._held:
                self._touch((index, digest))
            else:
                wanted.append((block, digest))
        if not wanted:
            return
        content = self._contents.read(index, np.array([block for block, _ in wanted], dtype=np.int32))
        for row, (_, digest) in zip(content, wanted, strict=True):
            key = index, digest
            # A copy, so that no block keeps the memory of the others.
            self._held[key] = _Held(zlib.crc32(row.data), row.nbytes, row.copy())
            self._in_memory[key] = None
            self._memory += row.nbytes
            self.counters.stored += 1
        while self._memory > self.settings.memory:
            self._spill(next(iter(self._in_memory)))

    def read(self, index: int, digests: Sequence[bytes]) -> list[Bytes] | None:
        """The content of stored blocks of pool `index`; None if a checksum is wrong, and it is forgotten."""
        began = perf_counter()
        contents = [self._content((index, digest)) for digest in digests]
        found = [content for content in contents if content is not None]
        for digest in reversed(digests):  # the end of a sequence is dropped first
            if (index, digest) in self._held:
                self._touch((index, digest))
        self._reading += perf_counter() - began
        return found if len(found) == len(contents) else None

    def write(self, index: int, blocks: Blocks, contents: Sequence[Bytes]) -> None:
        """Overwrite the blocks int32[C] of pool `index`."""
        if not contents:
            return
        began = perf_counter()
        stacked = np.stack(contents)
        self._contents.write(index, blocks, stacked)
        seconds = (self._reading + perf_counter() - began) / stacked.nbytes
        self._reading = 0.0
        self.load_seconds += _SMOOTHING * (seconds - self.load_seconds)

    def pays(self, keys: Sequence[Key], tokens: int) -> bool:
        """Whether loading `keys` is faster than computing `tokens` tokens."""
        size = sum(self._held[key].size for key in keys)
        if self.settings.always or size * self.load_seconds <= tokens * self.compute_seconds:
            return True
        if not self.compute_seconds or self._refusals >= _RETRY:
            self._refusals = 0
            return True
        self._refusals += 1
        self.counters.refused += len(keys)
        return False

    def computed(self, tokens: int, decodes: int, seconds: float) -> None:
        """Report the time of a step with `tokens` tokens of prompts, which counts if they are most of it."""
        if tokens < 4 * max(decodes, BLOCK):
            return
        rate = seconds / tokens
        self.compute_seconds += (_SMOOTHING if self.compute_seconds else 1.0) * (rate - self.compute_seconds)

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory."""
        return self._memory

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk."""
        return self._disk

    def _touch(self, key: Key) -> None:
        self._held[key] = self._held.pop(key)
        if key in self._in_memory:
            self._in_memory[key] = self._in_memory.pop(key)

    def _content(self, key: Key) -> Bytes | None:
        held = self._held[key]
        content = held.content
        if content is None:
            assert self._file is not None
            try:
                content = np.frombuffer(os.pread(self._file.fileno(), held.size, held.place), dtype=np.uint8)
            except OSError:
                content = np.zeros(0, dtype=np.uint8)
        if zlib.crc32(content.data) != held.checksum or content.nbytes != held.size:
            self.counters.corrupt += 1
            self._forget(key)
            return None
        if held.content is None:
            self.counters.loaded_from_disk += 1
        else:
            self.counters.loaded_from_memory += 1
        return content

    def _spill(self, key: Key) -> None:
        """Move a block from memory to disk, or drop it."""
        held = self._held[key]
        assert held.content is not None
        place = self._place(held.size)
        if place is None:
            self._forget(key)
            self.counters.dropped += 1
            return
        assert self._file is not None
        try:
            written = os.pwrite(self._file.fileno(), held.content.data, place)
        except OSError as error:
            written, self.disk_failure = -1, str(error)
        if written != held.size:
            self.disk_failure = self.disk_failure or "the disk is full"
            self.counters.disk_failures = 1
            self._forget(key)
            self.counters.dropped += 1
            return
        del self._in_memory[key]
        held.content, held.place = None, place
        self._memory -= held.size
        self._disk += held.size
        self.counters.spilled += 1

    def _place(self, size: int) -> int | None:
        """Where a block of `size` bytes can be written, or None."""
        if self._file is None or self.disk_failure or size > self.settings.disk:
            return None
        places = self._free_places.setdefault(size, [])
        if not places and self._end + size <= self.settings.disk:
            self._end += size
            return self._end - size
        while not places:
            oldest = next((key for key, held in self._held.items() if held.place >= 0), None)
            if oldest is None:
                return None
            self._forget(oldest)
            self.counters.dropped += 1
        return places.pop()

    def _forget(self, key: Key) -> None:
        held = self._held.pop(key)
        if held.content is not None:
            del self._in_memory[key]
            self._memory -= held.size
        else:
            self._disk -= held.size
            self._free_places.setdefault(held.size, []).append(held.place)
