"""JSON Lines over sockets to untrusted processes, with a timeout on every wait."""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from perilune.sandbox.folders import OwnedFolder
from perilune.sandbox.kernel import signal_name

_START = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
importlib.import_module(sys.argv[2]).main()
"""
_MAX_WAIT_S = 3600.0  # seconds; poll(2) takes no more than 2^31 milliseconds
_READ_BYTES = 65536
_MAX_ERROR_BYTES = 2000  # bytes of standard error kept for error messages
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class BrokenChannelError(Exception):
    """The process hung, died, sent too much or a malformed answer, and can no longer be trusted."""


class KilledError(BrokenChannelError):
    """A signal from outside ended the process, perhaps through no fault of its own."""


class ProcessSocket(ABC):
    """A socket to one process, and a pipe from its standard error.

    Pass `child_ends` to the process, then call `close_child_ends`.

    Args:
        name: name of the process in messages, such as "the scorer's process".
        answer_bytes: maximum bytes of one line, and of standard error in total.

    Attributes:
        child_ends: descriptors for the process: its end of the socket, and its standard error.
    """

    def __init__(self, name: str, answer_bytes: int) -> None:
        self.name = name
        self._socket, other = socket.socketpair()
        self._errors, their_errors = os.pipe()
        self.child_ends = (other.detach(), their_errors)
        self._answer_bytes = answer_bytes
        self._unsent = b""
        self._buffer = bytearray()
        self._error = b""
        self._error_bytes = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._errors, selectors.EVENT_READ)
        self._socket.setblocking(False)

    def close_child_ends(self) -> None:
        """Close this side's copies of the process's descriptors, so that its death is noticed."""
        for descriptor in self.child_ends:
            os.close(descriptor)

    def send(self, document: Mapping[str, Any]) -> None:
        """Queue one request. It is sent while `receive` waits."""
        line = json.dumps(document).encode() + b"\n"
        if not self._unsent:
            self._selector.modify(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
        self._unsent += line

    def send_descriptors(self, document: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Send a short request at once, together with descriptors. Nothing may be queued."""
        with contextlib.suppress(OSError):  # `receive` will report that the process has ended
            socket.send_fds(self._socket, [json.dumps(document).encode() + b"\n"], descriptors)

    def receive(self, seconds: float) -> dict[str, Any]:
        """Wait for the next answer.

        Raises:
            BrokenChannelError: if none arrives within `seconds`, or the process died, sent too much, or sent
                no JSON object.
        """
        until = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0:
                raise BrokenChannelError(f"no answer within {round(seconds, 2):g} s")
            for key, events in self._selector.select(min(left, _MAX_WAIT_S)):
                if key.fd == self._errors:
                    self._read_errors()
                else:
                    self._transfer(events)
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise BrokenChannelError(f"{self.name} sent a malformed answer")
        return document

    def close(self) -> None:
        """Close this side. The process sees the end of its requests."""
        self._selector.close()
        self._socket.close()
        os.close(self._errors)

    @abstractmethod
    def exit_code(self) -> int | None:
        """Return the exit code of the process after it closed the socket; None if it is still running."""

    def _transfer(self, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
                if not self._unsent:
                    self._selector.modify(self._socket, selectors.EVENT_READ)
            data = self._socket.recv(_READ_BYTES) if events & selectors.EVENT_READ else None
        except OSError:
            data = b""
        if data == b"":
            raise self._ending_error()
        self._buffer += data or b""
        if len(self._buffer) > self._answer_bytes and b"\n" not in self._buffer:
            raise BrokenChannelError(f"{self.name} wrote more than {self._answer_bytes} bytes for one answer")

    def _read_errors(self) -> None:
        data = os.read(self._errors, _READ_BYTES)
        if not data:
            self._selector.unregister(self._errors)
            return
        self._error = (self._error + data)[-_MAX_ERROR_BYTES:]
        self._error_bytes += len(data)
        if self._error_bytes > self._answer_bytes:
            most = self._answer_bytes
            raise BrokenChannelError(f"{self.name} wrote more than {most} bytes to standard error")

    def _ending_error(self) -> BrokenChannelError:
        code = self.exit_code()
        with contextlib.suppress(OSError):
            os.set_blocking(self._errors, False)
            self._error = (self._error + os.read(self._errors, _READ_BYTES))[-_MAX_ERROR_BYTES:]
        how = "closed its socket" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal_name(-code)}"
        last = self._error.decode(errors="replace").strip().splitlines()[-1:]
        kind = KilledError if code is not None and -code in _FROM_OUTSIDE else BrokenChannelError
        return kind(f"{self.name} {how}" + (f": {last[0]}" if last else ""))


class Channel(ProcessSocket):
    """A process in its own session, with a new environment and an empty working directory.

    The socket is its standard input and output. The process confines itself; its answers are not trusted.

    Args:
        module: module whose `main` runs in the process.
    """

    def __init__(self, module: str, name: str, answer_bytes: int) -> None:
        super().__init__(name, answer_bytes)
        self._folder = OwnedFolder("perilune-confined-")
        descriptor, errors = self.child_ends
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-B", "-c", _START, json.dumps(sys.path), module],
            stdin=descriptor,
            stdout=descriptor,
            stderr=errors,
            cwd=self._folder.path,
            env=_environment(self._folder.path),
            start_new_session=True,
        )
        self.close_child_ends()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Kill the process and its session. A `receive` that waits for it then raises."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process and its session, and remove its working directory."""
        self.kill()
        self._process.wait()
        super().close()
        self._folder.remove()

    def exit_code(self) -> int | None:
        """Return the exit code of the process; None if it is still running after a second."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return self._process.returncode


def _environment(directory: str) -> dict[str, str]:
    """Return environment variables without inherited ones, which may be secret."""
    return {
        "HOME": directory,
        "LANG": "C.UTF-8",
        "MPLCONFIGDIR": directory,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PATH": os.defpath,
        "PYTHONHASHSEED": "0",
        "TMPDIR": directory,
    }
