"""The log of an attempt. Its beginning and its end are kept, however much a task prints.

It is stored in pieces of `PIECE_BYTES`, each named after the offset of its first byte in the whole output:
runtime.log, runtime.log.8388608 and so on. If more than `KEPT_PIECES` complete pieces follow the first, the
oldest of those is deleted. So a log takes at most (2 + KEPT_PIECES) x PIECE_BYTES, can be followed while it
grows, and shows where output is missing.
"""

import codecs
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from perilune.redaction import RedactedStream, Redactor
from perilune.terminal import escape_control

LOG_NAME = "runtime.log"
PIECE_BYTES = 8 << 20
KEPT_PIECES = 2  # complete pieces to keep besides the first and the current one
TAIL_BYTES = 1 << 16
CHUNK_BYTES = 1 << 16
DRAIN_SECONDS = 5.0  # to wait for the copy of the last output


class LogWriter:
    """Appends to the log in `runtime`. On a full disk, output is lost and shows up as a gap."""

    def __init__(self, runtime: Path, piece: int = PIECE_BYTES) -> None:
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
        while data:
            if self._room == 0:
                self._next()
            part = data[: self._room]
            written = 0
            with contextlib.suppress(OSError):  # a full disk must not block the task
                if self._file is not None:
                    written = self._file.write(part) or 0
            self._at += len(part)
            # After a gap the next byte starts a new piece, named after its offset.
            self._room = self._room - len(part) if written == len(part) else 0
            data = data[len(part) :]

    def close(self) -> None:
        """Make the log durable."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def _next(self) -> None:
        self.close()
        self._room = self._piece
        with contextlib.suppress(OSError):
            name = f"{LOG_NAME}.{self._at}" if self._at else LOG_NAME
            self._file = (self._runtime / name).open("ab", buffering=0)
        for _, path in log_pieces(self._runtime)[1 : -1 - KEPT_PIECES]:
            with contextlib.suppress(OSError):
                path.unlink()


class LogPump:
    """Copies a pipe to a log in a thread, with secrets replaced, until every writer has closed the pipe.

    Args:
        redactor: knows the secrets that may be printed.
        echo: also copy to this process's stdout, made safe for a terminal.
    """

    def __init__(self, runtime: Path, redactor: Redactor, *, echo: bool = False) -> None:
        self._log = LogWriter(runtime)
        self._stream = RedactedStream(redactor)
        self._echo = codecs.getincrementaldecoder("utf-8")(errors="replace") if echo else None
        self._reader, self.writer = os.pipe()
        self._thread = threading.Thread(target=self._copy, name="log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until everything is copied, then make the log durable. Call it after all writers ended."""
        os.close(self.writer)
        self._thread.join(DRAIN_SECONDS)
        self._log.close()

    def _copy(self) -> None:
        while data := os.read(self._reader, CHUNK_BYTES):
            self._write(self._stream.feed(data))
        self._write(self._stream.close())
        os.close(self._reader)

    def _write(self, text: bytes) -> None:
        self._log.write(text)
        if self._echo is not None:
            encoding = sys.stdout.encoding or "utf-8"
            shown = escape_control(self._echo.decode(text)).encode(encoding, "replace").decode(encoding)
            try:
                sys.stdout.write(shown)
                sys.stdout.flush()
            except (OSError, ValueError):  # stdout was closed, but the task goes on
                self._echo = None


def log_pieces(runtime: Path) -> list[tuple[int, Path]]:
    """Return the pieces of a log with the offsets of their first bytes, in order."""
    pieces = []
    for path in runtime.glob(f"{LOG_NAME}*"):
        suffix = path.name.removeprefix(LOG_NAME)
        if not suffix or (suffix[0] == "." and suffix[1:].isdecimal()):
            pieces.append((int(suffix[1:] or 0), path))
    return sorted(pieces)


class LogReader:
    """Reads the log in `runtime` from byte `place` of the whole output, and follows it as it grows."""

    def __init__(self, runtime: Path, place: int = 0) -> None:
        self._runtime, self._place = runtime, place

    def read(self) -> Iterator[bytes]:
        """Yield the output since the last call; a line says how much is missing at a gap."""
        for start, path in log_pieces(self._runtime):
            # The writer may delete a piece meanwhile.
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                if start + os.fstat(file.fileno()).st_size <= self._place:
                    continue
                if start > self._place:
                    yield f"\n--- {start - self._place:,} bytes omitted ---\n".encode()
                    self._place = start
                file.seek(self._place - start)
                while block := file.read(TAIL_BYTES):
                    self._place += len(block)
                    yield block


def log_tail(runtime: Path, lines: int = 20) -> str:
    """Return the last lines of a log, from its last `TAIL_BYTES` bytes; "" if nothing was printed."""
    end = max((start + path.stat().st_size for start, path in log_pieces(runtime)), default=0)
    return last_lines(b"".join(LogReader(runtime, max(0, end - TAIL_BYTES)).read()), lines)


def last_lines(data: bytes, lines: int) -> str:
    return "\n".join(data.decode("utf-8", errors="replace").splitlines()[-lines:])


def write_whole_log(runtime: Path, destination: Path) -> None:
    """Write everything kept of a log to one file; nothing if nothing was printed."""
    if log_pieces(runtime):
        with destination.open("wb") as file:
            file.writelines(LogReader(runtime).read())
