"""What a task prints, on its way to runtime/; secrets are replaced before they reach the disk."""

from __future__ import annotations

import codecs
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from perilune.bundle.redaction import redact
from perilune.execution.log import LogWriter
from perilune.terminal import printable

CHUNK = 1 << 16
DRAIN_SECONDS = 5.0


class LogPump:
    """Copies what comes through a pipe into a log, from a thread, until every writer has closed it.

    Args:
        runtime: directory of the log, which is added to.
        secrets: forms in which secrets' values may be printed, to their names (`secret_values`).
        echo: also copy to this process's stdout, made safe for a terminal.
    """

    def __init__(self, runtime: Path, secrets: Mapping[bytes, str], *, echo: bool = False) -> None:
        self._log = LogWriter(runtime)
        self._secrets = secrets
        self._held = max(map(len, secrets), default=1) - 1
        self._echo = codecs.getincrementaldecoder("utf-8")(errors="replace") if echo else None
        self._reader, self.writer = os.pipe()
        self._thread = threading.Thread(target=self._copy, name="log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until all is copied, then make it durable. Call after every writer has ended."""
        os.close(self.writer)
        self._thread.join(DRAIN_SECONDS)
        self._log.close()

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
        self._log.write(text)
        if self._echo is not None:
            sys.stdout.write(printable(self._echo.decode(text)))
            sys.stdout.flush()
