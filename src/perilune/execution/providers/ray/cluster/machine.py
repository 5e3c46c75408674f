"""A machine on a Ray cluster: an actor on a node that runs commands and has a folder there.

No call except `stay` takes much longer than `SLICE` seconds, so a few threads can serve many commands.
"""

from __future__ import annotations

import hmac
import os
import select
import subprocess
import threading
import time
import uuid

from .folders import create_home, environment
from .frames import token_proof

BLOCK = 1 << 20  # bytes per call
SLICE = 1.0  # seconds that a call may wait for input or output
LINGER = 2.0  # seconds to wait for output of background processes after the exit
MAX_NONCES = 256  # outstanding
IDLE_TIMEOUT_S = 120.0  # seconds without a call after which a command is closed


class Machine:
    """Runs commands on this node for the lifetime of its process.

    Args:
        workspace: folder on this node for the folders of machines.
        token: secret that clients must prove to know.
        cores: CPU cores that Ray has reserved for it; 0 is unknown.
    """

    def __init__(self, key: str, workspace: str, token: str, cores: float = 0.0) -> None:
        self._home, self._token = create_home(key, workspace), token
        self._environment = environment(self._home, cores)
        self._nonces: list[str] = []
        self._commands: dict[str, Command] = {}

    def address(self) -> str:
        """Return the address at which the attempt's other machines reach this one."""
        import ray

        return str(ray.util.get_node_ip_address())

    def stay(self) -> None:
        """Never return, so that a caller notices when this machine dies."""
        threading.Event().wait()

    def greet(self, nonce: str) -> dict[str, str]:
        """Prove this machine's identity, and return a nonce for one `open`."""
        self._nonces = [*self._nonces[-MAX_NONCES:], uuid.uuid4().hex]
        return {"proof": token_proof(self._token, "machine", nonce), "nonce": self._nonces[-1]}

    def open(self, command: list[str], nonce: str, proof: str) -> str:
        """Start a command; returns its name for the other calls.

        Raises:
            PermissionError: the client does not know the token, or repeats a request.
        """
        if not hmac.compare_digest(proof, token_proof(self._token, "command", nonce, *command)):
            raise PermissionError("the token is wrong")
        if nonce not in self._nonces:
            raise PermissionError("the request was used before")
        self._nonces.remove(nonce)
        for name, other in list(self._commands.items()):
            if time.monotonic() - other.touched > IDLE_TIMEOUT_S:
                self.close(name)
        name = uuid.uuid4().hex
        self._commands[name] = Command(command, self._home, self._environment)
        return name

    def write(self, name: str, data: bytes) -> int:
        """Write to a command's stdin; returns the number of bytes accepted."""
        return self._commands[name].write(data)

    def end_input(self, name: str) -> None:
        """Close a command's stdin."""
        self._commands[name].end_input()

    def read(self, name: str) -> tuple[bytes, bytes, int | None]:
        """Return new stdout and stderr of a command, and its exit code once it has ended and all was read."""
        return self._commands[name].read()

    def close(self, name: str) -> None:
        """Forget a command and close its pipes; the process may continue."""
        command = self._commands.pop(name, None)
        if command is not None:
            command.close()


class Command:
    """A process and its pipes, with at most one writing and one reading thread.

    Attributes:
        touched: time of the last call, on the monotonic clock.
    """

    def __init__(self, command: list[str], home: str, environment: dict[str, str]) -> None:
        self.touched = time.monotonic()
        self._ended: float | None = None
        try:
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=home,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:  # report it like a shell
            self._process = subprocess.Popen(
                ["sh", "-c", 'echo "$0" >&2; exit 127', str(error)],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._input, self._output, self._errors = (
            self._process.stdin,
            self._process.stdout,
            self._process.stderr,
        )
        os.set_blocking(self._input.fileno(), False)
        self._open = [self._output, self._errors]

    def write(self, data: bytes) -> int:
        """See `Machine.write`; input that the process does not read counts as accepted."""
        pipe, taken, until = self._input.fileno(), 0, time.monotonic() + SLICE
        while taken < len(data) and time.monotonic() < until:
            self.touched = time.monotonic()
            try:
                taken += os.write(pipe, data[taken:])
            except BlockingIOError:
                ready(until, writing=[pipe])
            except BrokenPipeError:
                return len(data)
        return taken

    def end_input(self) -> None:
        self._input.close()

    def read(self) -> tuple[bytes, bytes, int | None]:
        """See `Machine.read`; waits briefly for output."""
        self.touched = time.monotonic()
        came = {self._output: b"", self._errors: b""}
        patience = SLICE if self._ended is None else 0.1
        if not self._open:
            return b"", b"", self._code(SLICE)
        for pipe in ready(time.monotonic() + patience, reading=[file.fileno() for file in self._open]):
            stream = next(file for file in self._open if file.fileno() == pipe)
            came[stream] = os.read(pipe, BLOCK)
            if not came[stream]:
                self._open.remove(stream)
        output, errors = came.values()
        if output or errors or self._code(0.0) is None:
            return output, errors, None
        self._ended = self._ended or time.monotonic()
        lingered = not self._open or time.monotonic() - self._ended > LINGER
        return b"", b"", self._code(0.0) if lingered else None

    def _code(self, patience: float) -> int | None:
        """Return the exit code, with signals as in a shell; None while it runs."""
        try:
            code = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return None
        return 128 - code if code < 0 else code

    def close(self) -> None:
        for pipe in (self._input, self._output, self._errors):
            pipe.close()


def ready(until: float, reading: list[int] | None = None, writing: list[int] | None = None) -> list[int]:
    """Return the pipes that are ready before the time `until`."""
    poll = select.poll()
    for pipe in reading or []:
        poll.register(pipe, select.POLLIN)
    for pipe in writing or []:
        poll.register(pipe, select.POLLOUT)
    return [pipe for pipe, _ in poll.poll(max(0.0, until - time.monotonic()) * 1000)]
