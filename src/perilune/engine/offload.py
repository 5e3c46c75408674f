"""KV offloading: evicted blocks go to host memory, and from there to a file.

A later request loads them if loading is faster than computing. Blocks are stored byte for byte, so samples
are the same with and without offloading. Every block has a checksum; a block whose checksum does not match is
computed again. The file has no name, so the system deletes it when the process ends.
"""

import os
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from perilune.engine.blocks import BLOCK, Blocks
from perilune.engine.cache import PagedCache

Bytes = NDArray[np.uint8]
Key = tuple[int, bytes]
"""Index of the pool, and digest of the block."""

_EMA_WEIGHT = 0.2  # weight of the newest measurement in a rate
_REFUSALS_BEFORE_RETRY = 64  # a transfer that was too slow is tried again after this many refusals


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """The sizes and location of the store.

    Attributes:
        memory: maximum number of bytes in host memory.
        disk: maximum number of bytes in a file; 0 for no file.
        folder: folder of the file; None for the system's folder of temporary files.
        always: load blocks even where computing them is faster.
    """

    memory: int
    disk: int = 0
    folder: Path | None = None
    always: bool = False


@dataclass(slots=True)
class OffloadCounters:
    """Counts since the store was created, in blocks.

    Attributes:
        stored: written to memory.
        dropped: removed for lack of room.
        loaded_from_memory, loaded_from_disk: loaded into the cache.
        corrupt: with a wrong checksum, or unreadable.
        refused: not loaded, because computing is faster.
        disk_failures: 1 once a write to disk has failed, after which the disk is not used; otherwise 0.
    """

    stored: int = 0
    dropped: int = 0
    loaded_from_memory: int = 0
    loaded_from_disk: int = 0
    corrupt: int = 0
    refused: int = 0
    disk_failures: int = 0


@dataclass(slots=True)
class StoredBlock:
    """A block in the store: its checksum, and its bytes or its offset in the file."""

    checksum: int
    size: int
    content: Bytes | None
    offset: int = -1


class OffloadStore:
    """The offloaded blocks, the least recently used first.

    Args:
        contents: the cache whose blocks are stored and loaded.

    Attributes:
        seconds: the clock that measures copies and steps.
        compute_seconds: running mean of the seconds to compute a token of a prompt; 0 until measured.
        load_seconds: running mean of the seconds to load a byte.
        memory_bytes, disk_bytes: bytes in memory and on disk.
        disk_failure: the error of the failed write after which the disk is no longer used; "" before.
    """

    def __init__(
        self, settings: OffloadSettings, contents: PagedCache, seconds: Callable[[], float] = perf_counter
    ) -> None:
        self.settings, self._contents, self.seconds = settings, contents, seconds
        self._stored: dict[Key, StoredBlock] = {}  # in memory and on disk, the least recently used first
        self._in_memory: dict[Key, None] = {}
        self.memory_bytes = self.disk_bytes = 0
        self._file = self._open_file() if settings.disk else None
        self._free_offsets: dict[int, list[int]] = {}  # by size
        self._file_end = 0
        self._refusals = 0
        self._read_seconds = 0.0  # seconds of reads since the last write
        self.counters = OffloadCounters()
        self.compute_seconds = 0.0
        self.load_seconds = 1e-9
        self.disk_failure = ""

    def __contains__(self, key: Key) -> bool:
        return key in self._stored

    def replace_cache(self, contents: PagedCache) -> None:
        """Read and write blocks of another cache from now on."""
        self._contents = contents

    def clear(self) -> None:
        """Empty the store, because the weights have changed."""
        for kept in (self._stored, self._in_memory, self._free_offsets):
            kept.clear()
        self.memory_bytes = self.disk_bytes = self._file_end = 0

    def save(self, index: int, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Store blocks of pool `index`. When memory is full, the first blocks leave it first."""
        wanted = []
        for block, digest in zip(blocks, digests, strict=True):
            if (index, digest) in self._stored:
                self._mark_used((index, digest))
            else:
                wanted.append((block, digest))
        if not wanted:
            return
        copies = self._copy(index, np.array([block for block, _ in wanted], dtype=np.int32))
        for stored, (_, digest) in zip(copies, wanted, strict=True):
            self._stored[index, digest] = stored
            self._in_memory[index, digest] = None
            self.memory_bytes += stored.size
            self.counters.stored += 1
        while self.memory_bytes > self.settings.memory:
            self._move_to_disk(next(iter(self._in_memory)))

    def read(self, index: int, digests: Sequence[bytes]) -> list[Bytes] | None:
        """Read stored blocks of pool `index`. Delete corrupt blocks; return None if there are any."""
        began = self.seconds()
        contents = [self._read_block((index, digest)) for digest in digests]
        found = [content for content in contents if content is not None]
        for digest in reversed(digests):  # the end of a sequence is dropped first
            if (index, digest) in self._stored:
                self._mark_used((index, digest))
        self._read_seconds += self.seconds() - began
        return found if len(found) == len(contents) else None

    def write(self, index: int, blocks: Blocks, contents: Sequence[Bytes]) -> None:
        """Overwrite the blocks int32[C] of pool `index`."""
        if not contents:
            return
        began = self.seconds()
        size = self._overwrite(index, blocks, contents)
        seconds = (self._read_seconds + self.seconds() - began) / size
        self._read_seconds = 0.0
        self.load_seconds += _EMA_WEIGHT * (seconds - self.load_seconds)

    def is_worth_loading(self, keys: Sequence[Key], tokens: int) -> bool:
        """Return whether loading `keys` is faster than computing `tokens` tokens."""
        size = sum(self._stored[key].size for key in keys)
        if self.settings.always or size * self.load_seconds <= tokens * self.compute_seconds:
            return True
        if not self.compute_seconds or self._refusals >= _REFUSALS_BEFORE_RETRY:
            self._refusals = 0
            return True
        self._refusals += 1
        self.counters.refused += len(keys)
        return False

    def record_compute_time(self, tokens: int, decodes: int, seconds: float) -> None:
        """Record the time of a step with `tokens` prompt tokens, unless these are a small part of the step.

        Args:
            decodes: decoding samples in the step.
        """
        if tokens < 4 * max(decodes, BLOCK):
            return
        rate = seconds / tokens
        self.compute_seconds += (_EMA_WEIGHT if self.compute_seconds else 1.0) * (rate - self.compute_seconds)

    def _mark_used(self, key: Key) -> None:
        self._stored[key] = self._stored.pop(key)
        if key in self._in_memory:
            self._in_memory[key] = self._in_memory.pop(key)

    def _read_block(self, key: Key) -> Bytes | None:
        stored = self._stored[key]
        content = self._load(stored)
        if content is None:
            self.counters.corrupt += 1
            self._remove(key)
            return None
        if stored.content is None:
            self.counters.loaded_from_disk += 1
        else:
            self.counters.loaded_from_memory += 1
        return content

    # -- bytes ---------------------------------------------------------------------------------------------

    def _copy(self, index: int, blocks: Blocks) -> list[StoredBlock]:
        """Copy blocks of pool `index` from the cache."""
        # Copy each row: a view would keep the memory of all rows alive.
        return [
            StoredBlock(zlib.crc32(row.data), row.nbytes, row.copy())
            for row in self._contents.read(index, blocks)
        ]

    def _overwrite(self, index: int, blocks: Blocks, contents: Sequence[Bytes]) -> int:
        """Overwrite blocks of pool `index` in the cache, and return the number of bytes."""
        stacked = np.stack(contents)
        self._contents.write(index, blocks, stacked)
        return stacked.nbytes

    def _load(self, stored: StoredBlock) -> Bytes | None:
        """Return the bytes of a block; None if they are unreadable or have another checksum."""
        content = stored.content
        if content is None:
            assert self._file is not None
            try:
                data = os.pread(self._file.fileno(), stored.size, stored.offset)
            except OSError:
                return None
            content = np.frombuffer(data, dtype=np.uint8)
        intact = content.nbytes == stored.size and zlib.crc32(content.data) == stored.checksum
        return content if intact else None

    def _open_file(self) -> BinaryIO | None:
        return tempfile.TemporaryFile(dir=self.settings.folder)

    def _write_to_file(self, stored: StoredBlock, offset: int) -> int:
        """Write the bytes of a block in memory, and return how many were written."""
        assert self._file is not None and stored.content is not None
        return os.pwrite(self._file.fileno(), stored.content.data, offset)

    # -- memory and disk -----------------------------------------------------------------------------------

    def _move_to_disk(self, key: Key) -> None:
        """Move a block from memory to disk, or drop it."""
        stored = self._stored[key]
        offset = self._allocate_offset(stored.size)
        if offset is None:
            self._remove(key)
            self.counters.dropped += 1
            return
        try:
            written = self._write_to_file(stored, offset)
        except OSError as error:
            written, self.disk_failure = -1, str(error)
        if written != stored.size:
            self.disk_failure = self.disk_failure or "the disk is full"
            self.counters.disk_failures = 1
            self._remove(key)
            self.counters.dropped += 1
            return
        del self._in_memory[key]
        stored.content, stored.offset = None, offset
        self.memory_bytes -= stored.size
        self.disk_bytes += stored.size

    def _allocate_offset(self, size: int) -> int | None:
        """Return the offset at which a block of `size` bytes can be written, or None."""
        if self.disk_failure or size > self.settings.disk:
            return None
        offsets = self._free_offsets.setdefault(size, [])
        if not offsets and self._file_end + size <= self.settings.disk:
            self._file_end += size
            return self._file_end - size
        while not offsets:
            oldest = next((key for key, stored in self._stored.items() if stored.offset >= 0), None)
            if oldest is None:
                return None
            self._remove(oldest)
            self.counters.dropped += 1
        return offsets.pop()

    def _remove(self, key: Key) -> None:
        stored = self._stored.pop(key)
        if stored.content is not None:
            del self._in_memory[key]
            self.memory_bytes -= stored.size
        else:
            self.disk_bytes -= stored.size
            self._free_offsets.setdefault(stored.size, []).append(stored.offset)
