"""This machine as a host."""

import contextlib
import io
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

from perilune.execution.hosts.protocol import MAX_OUTPUT_BYTES, TOO_MUCH_OUTPUT, Answer, HostUnreachableError

NOT_FOUND_EXIT_CODE = 127  # a shell's exit code for a missing program
TAIL_BYTES = 1 << 14  # bytes of stderr to keep
CHECK_SECONDS = 1.0  # between two checks of the size of the output


class LocalHost:
    """Runs commands on this machine."""

    def __init__(self, name: str = "local") -> None:
        self.name = name

    def run(
        self,
        command: Sequence[str],
        *,
        source: BinaryIO | None = None,
        sink: BinaryIO | None = None,
        timeout: float = 60.0,
    ) -> Answer:
        with (
            _open_stdin(source) as given,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as errors,
        ):
            try:
                process = subprocess.Popen(
                    list(command),
                    stdin=given,
                    stdout=sink or out,
                    stderr=errors,
                    start_new_session=True,  # this process handles Ctrl-C
                )
            except FileNotFoundError as error:
                return Answer(NOT_FOUND_EXIT_CODE, b"", str(error))
            try:
                code = self._wait(process, timeout, (sink or out, errors))
            finally:
                if process.poll() is None:
                    # Kill the whole group: a child that survives could write until the disk is full.
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            out.seek(0)
            return Answer(code if code >= 0 else 128 - code, out.read(), _read_tail(errors))

    def _wait(self, process: subprocess.Popen[bytes], timeout: float, outputs: Sequence[BinaryIO]) -> int:
        """Return the exit code of a process that writes to `outputs`."""
        until = time.monotonic() + timeout
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(max(0.0, min(CHECK_SECONDS, until - time.monotonic())))
            if any(os.fstat(file.fileno()).st_size > MAX_OUTPUT_BYTES for file in outputs):
                raise HostUnreachableError(TOO_MUCH_OUTPUT, where=self.name)
            if time.monotonic() >= until:
                raise HostUnreachableError(f"no answer in {timeout:.0f} s", where=self.name)


@contextmanager
def _open_stdin(source: BinaryIO | None) -> Iterator[BinaryIO | int]:
    """Yield a file with a descriptor and the content of `source`."""
    if source is None:
        yield subprocess.DEVNULL
        return
    try:
        source.fileno()
    except io.UnsupportedOperation:
        with tempfile.TemporaryFile() as file:
            file.write(source.read())
            file.seek(0)
            yield file
    else:
        yield source


def _read_tail(file: BinaryIO) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL_BYTES))
    return file.read().decode("utf-8", "replace")
