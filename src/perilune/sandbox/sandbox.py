"""The sandbox: runs untrusted Python in a separate process behind walls that the kernel enforces."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import perilune
from perilune.errors import RequestError, WorkFailedError
from perilune.sandbox.folders import OwnedFolder
from perilune.sandbox.limits import SandboxLimits
from perilune.sandbox.mechanisms import WALLS, Mechanisms
from perilune.sandbox.wire import HEADER, encode_frame

_START = """
import json, sys
sys.path.append(sys.argv[1])
from perilune.sandbox.supervisor import main
main()
"""
_GRACE = 20.0  # seconds beyond the time limit after which the supervisor counts as hung
_START_SECONDS = 60.0


class SandboxFailedError(WorkFailedError):
    """The sandbox itself failed, not the code in it."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The walls that stand on this machine.

    Attributes:
        walls: for each wall the mechanisms that implement it; none if the wall is missing.
        reasons: for each missing mechanism, why.
    """

    mechanisms: Mechanisms
    walls: Mapping[str, tuple[str, ...]]
    reasons: Mapping[str, str]

    @property
    def missing(self) -> tuple[str, ...]:
        """The walls that do not stand."""
        return tuple(wall for wall, made_of in self.walls.items() if not made_of)


@dataclass(frozen=True, slots=True)
class Execution:
    """The result of one run.

    Attributes:
        cause: empty for exit code 0; "error" for another exit code; "timeout" (clock or CPU), "memory",
            "output" or "scratch" if the run was killed for exceeding a limit; "memory" also if it ended with
            a MemoryError; "report" if the report with its files was too large; "killed" for any other signal.
        exit_code: None if a signal ended it.
        output: standard output and standard error in order; a line replaces a part that was cut.
        seconds: wall-clock time.
        files: the regular files in the scratch folder after the run, within the limits; those before the run
            if it was killed.
    """

    cause: str
    exit_code: int | None
    signal: int | None
    output: str
    seconds: float
    files: Mapping[str, bytes] = field(default_factory=dict)


class Sandbox:
    """Runs Python code behind walls, one run at a time. Runs share nothing but the files passed on.

    The code sees Python's own library, and its files in a scratch folder, the working directory. A run costs
    milliseconds, because a fork server starts it.

    Args:
        without: mechanisms to switch off ("namespaces", "own_user", "landlock", "seccomp", "control_group"),
            to test the others.
        allow_missing: walls that may be missing. By default, nothing is run if a wall is missing.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        without: Collection[str] = (),
        allow_missing: Collection[str] = (),
    ) -> None:
        for wall in allow_missing:
            if wall not in WALLS:
                raise RequestError(f"the sandbox has no wall '{wall}'", remedy=f"one of: {', '.join(WALLS)}")
        self.limits = limits or SandboxLimits()
        self._without, self._allowed = frozenset(without), frozenset(allow_missing)
        self._supervisor: _Supervisor | None = None
        self._lock = threading.Lock()  # one run at a time

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def capabilities(self) -> Capabilities:
        """Return the walls that stand on this machine, determined by testing them.

        Raises:
            SandboxFailedError: if nothing can be run on this machine.
        """
        return self._started().capabilities

    def run(self, code: str, files: Mapping[str, bytes] | None = None) -> Execution:
        """Run `code` as a main program in a folder with `files` (relative names).

        Raises:
            RequestError: if a required wall is missing, or a file name is invalid.
            SandboxFailedError: if the sandbox fails.
        """
        files = dict(files or {})
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
                raise RequestError(f"{name!r} is not a valid file name in the scratch folder")
        given = {name: base64.b64encode(content).decode() for name, content in files.items()}
        with self._lock:
            supervisor = self._started()
            self._require_walls(supervisor.capabilities)
            try:
                answer = supervisor.ask({"code": code, "files": given}, self.limits.seconds + _GRACE)
                return _execution(answer, files)
            except SandboxFailedError:
                self.close()
                raise

    @property
    def process_id(self) -> int:
        """Process id of the supervisor, the ancestor of all runs."""
        return self._started().process_id

    def close(self) -> None:
        """End the supervisor. The next run starts another."""
        if self._supervisor is not None:
            self._ended()
        self._supervisor = None

    def _started(self) -> _Supervisor:
        if self._supervisor is None:
            self._supervisor = _Supervisor(self.limits, self._without)
            self._ended = weakref.finalize(self, self._supervisor.close)
        return self._supervisor

    def _require_walls(self, found: Capabilities) -> None:
        missing = [wall for wall in found.missing if wall not in self._allowed]
        if missing:
            self.close()
            reasons = "; ".join(f"{name}: {why}" for name, why in found.reasons.items())
            raise RequestError(
                f"this machine lacks walls of the sandbox: {', '.join(missing)} ({reasons})",
                where="sandbox",
                remedy="see `perilune sandbox audit`; `allow_missing` permits runs without these walls",
            )


class _Supervisor:
    """The supervisor process, which forks runs, and the socket to it."""

    def __init__(self, limits: SandboxLimits, without: frozenset[str]) -> None:
        if sys.platform != "linux":
            raise SandboxFailedError(f"the sandbox needs Linux; this is {sys.platform}")
        self._folder = OwnedFolder("perilune-sandbox-")
        folder = self._folder.path
        Path(folder).chmod(0o711)  # the run's own user passes through it
        self._socket, child_end = socket.socketpair()
        opening = {"limits": asdict(limits), "folder": folder, "without": sorted(without)}
        package = str(Path(perilune.__file__).parents[1])
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-B", "-c", _START, package, json.dumps(opening)],
                stdin=child_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "TZ": "UTC"},
                start_new_session=True,
            )
        try:
            found = self._receive(_START_SECONDS)
            mechanisms = Mechanisms(**found["mechanisms"])
            self.capabilities = Capabilities(mechanisms, mechanisms.walls(), found["reasons"])
        except BaseException:
            self.close()
            raise

    @property
    def process_id(self) -> int:
        return self._process.pid

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(encode_frame(request))
        except OSError as error:
            raise SandboxFailedError(f"the sandbox's process does not accept requests: {error}") from None
        return self._receive(seconds)

    def close(self) -> None:
        """Close the socket, which ends the run, and kill the supervisor if it does not exit."""
        self._socket.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.remove()

    def _receive(self, seconds: float) -> dict[str, Any]:
        self._socket.settimeout(seconds)
        try:
            document = json.loads(self._exactly(int(self._exactly(HEADER), 16)))
        except TimeoutError:
            raise SandboxFailedError(f"the sandbox's process did not answer within {seconds:g} s") from None
        except (OSError, ValueError) as error:
            raise SandboxFailedError(f"the sandbox's process has ended: {error}") from None
        if not isinstance(document, dict) or "failed" in document:
            raise SandboxFailedError(f"the sandbox cannot be built: {document}")
        return document

    def _exactly(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            data = self._socket.recv(min(size - len(received), 1 << 16))
            if not data:
                raise OSError("it closed the socket")
            received += data
        return bytes(received)


def _execution(answer: Mapping[str, Any], before: Mapping[str, bytes]) -> Execution:
    report = answer["report"]
    if "failed" in report:
        raise SandboxFailedError(f"the sandbox cannot be built: {report['failed']}")
    cause, seconds = answer["cause"], float(answer["seconds"])
    output = bytes.fromhex(answer["output"]).decode(errors="replace")
    if cause or "status" not in report:
        return Execution(cause or "killed", None, signal.SIGKILL, output, seconds, before)
    exit_code = os.waitstatus_to_exitcode(report["status"])
    if exit_code < 0:
        cause = "timeout" if -exit_code == signal.SIGXCPU else "killed"
        return Execution(cause, None, -exit_code, output, seconds, before)
    files = {name: base64.b64decode(content) for name, content in report["files"].items()}
    cause = "error" if exit_code else ""
    if exit_code and output.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        cause = "memory"
    return Execution(cause, exit_code, None, output, seconds, files)
