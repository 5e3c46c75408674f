"""Copies a task's output to its log in runtime/, with secrets replaced before they reach the disk."""

import codecs
import os
import sys
import threading
from pathlib import Path

from perilune.execution.log import LogWriter
from perilune.redaction import RedactedStream, Redactor
from perilune.terminal import escape_control

CHUNK_BYTES = 1 << 16
DRAIN_SECONDS = 5.0


class LogPump:
    """Copies a pipe to a log in a thread, until every writer has closed the pipe.

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
            sys.stdout.write(escape_control(self._echo.decode(text)))
            sys.stdout.flush()
