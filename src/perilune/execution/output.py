"""What a task prints, on its way to runtime/runtime.log; secrets are replaced before they reach the disk."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from perilune.bundle.redaction import redact

CHUNK = 1 << 16
DRAIN_SECONDS = 5.0


class LogPump:
    """Copies what comes through a pipe into a file, from a thread, until every writer has closed it.

    Args:
        log: file appended to.
        secrets: forms in which secrets' values may be printed, to their names (`secret_values`).
        echo: also copy to this process's stdout.
    """

    def __init__(self, log: Path, secrets: Mapping[bytes, str], *, echo: bool = False) -> None:
        self._file = log.open("ab", buffering=0)
        self._secrets = secrets
        self._held = max(map(len, secrets), default=1) - 1
        self._echo = echo
        self._reader, self.writer = os.pipe()
        self._thread = threading.Thread(target=self._copy, name="log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until all is copied, then make it durable. Call after every writer has ended."""
        os.close(self.writer)
        self._thread.join(DRAIN_SECONDS)
        with contextlib.suppress(OSError):
            os.fsync(self._file.fileno())
        self._file.close()

    def _copy(self) -> None:
        rest = b""
        while data := os.read(self._reader, CHUNK):
            text = redact(rest + data, self._secrets)
            # A value may be cut in two by the pipe: its possible beginning waits for the rest.
            keep = self._possible_beginning(text)
            rest = text[len(text) - keep :]
            self._write(text[: len(text) - keep])
        self._write(rest)
        os.close(self._reader)

    def _possible_beginning(self, text: bytes) -> int:
        for length in range(min(self._held, len(text)), 0, -1):
            if any(value.startswith(text[-length:]) for value in self._secrets):
                return length
        return 0

    def _write(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk must not block the task; it will meet it itself
            self._file.write(text)
        if self._echo:
            sys.stdout.buffer.write(text)
            sys.stdout.flush()
