"""The log of an attempt: its beginning and its end are kept, whatever a task prints.

It lies in pieces of `PIECE` bytes, each named after the place of its first byte in all that was printed:
runtime.log, runtime.log.8388608 and so on. When more than `TAIL` whole ones follow the first, the oldest of
them goes. So a log takes at most (2 + TAIL) x PIECE bytes, can be followed while it is written, and tells by
itself what is missing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

NAME = "runtime.log"
PIECE = 8 << 20  # bytes
TAIL = 2  # whole pieces kept besides the first and the one being written
BLOCK = 1 << 16


class LogWriter:
    """Adds to the log in `runtime`. A full disk costs what did not fit, and is told like any gap."""

    def __init__(self, runtime: Path, piece: int = PIECE) -> None:
        self._runtime, self._piece = runtime, piece
        pieces = log_pieces(runtime)
        self._at = max((start + path.stat().st_size for start, path in pieces), default=0)
        self._file: BinaryIO | None = None
        self._room = 0
        if pieces:
            start, path = pieces[-1]
            self._room = max(0, piece - (self._at - start))
            self._file = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Add `data`."""
        while data:
            if self._room == 0:
                self._next()
            part = data[: self._room]
            written = 0
            with contextlib.suppress(OSError):  # a full disk must not block the task; it will meet it itself
                if self._file is not None:
                    written = self._file.write(part) or 0
            self._at += len(part)
            # After a gap the next byte must stand in a piece of its own, named after its place.
            self._room = self._room - len(part) if written == len(part) else 0
            data = data[len(part) :]

    def close(self) -> None:
        """Make all of it durable."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def _next(self) -> None:
        self.close()
        self._room = self._piece
        with contextlib.suppress(OSError):
            name = f"{NAME}.{self._at}" if self._at else NAME
            self._file = (self._runtime / name).open("ab", buffering=0)
        for _, path in log_pieces(self._runtime)[1 : -1 - TAIL]:
            path.unlink(missing_ok=True)


def log_pieces(runtime: Path) -> list[tuple[int, Path]]:
    """The pieces of a log that are there, each with the place of its first byte, in order."""
    found = []
    for path in runtime.glob(f"{NAME}*"):
        place = path.name.removeprefix(NAME)
        if not place or (place[0] == "." and place[1:].isdecimal()):
            found.append((int(place[1:] or 0), path))
    return sorted(found)


class LogReader:
    """Reads the log in `runtime` from byte `place` of all that was printed, and on as it grows."""

    def __init__(self, runtime: Path, place: int = 0) -> None:
        self._runtime, self._place = runtime, place

    def read(self) -> Iterator[bytes]:
        """What has come since the last call; where something was left out, a line says how much."""
        for start, path in log_pieces(self._runtime):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # it may go meanwhile
                if start + os.fstat(file.fileno()).st_size <= self._place:
                    continue
                if start > self._place:
                    yield f"\n--- {start - self._place:,} bytes left out here ---\n".encode()
                    self._place = start
                file.seek(self._place - start)
                while block := file.read(BLOCK):
                    self._place += len(block)
                    yield block


def log_tail(runtime: Path, lines: int = 20) -> str:
    """The last lines of a log, from its last `BLOCK` bytes; "" when nothing was printed."""
    end = max((start + path.stat().st_size for start, path in log_pieces(runtime)), default=0)
    return last_lines(b"".join(LogReader(runtime, max(0, end - BLOCK)).read()), lines)


def last_lines(data: bytes, lines: int) -> str:
    """The last lines of `data` as text."""
    return "\n".join(data.decode("utf-8", errors="replace").splitlines()[-lines:])


def write_whole_log(runtime: Path, destination: Path) -> None:
    """Write all that is kept of a log to one file; none when nothing was printed."""
    if log_pieces(runtime):
        with destination.open("wb") as file:
            file.writelines(LogReader(runtime).read())
