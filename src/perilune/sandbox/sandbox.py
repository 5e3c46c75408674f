"""Sandbox: runs Python that nobody trusts, in a process of its own behind walls that the kernel keeps."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

import perilune
from perilune.errors import RequestError, WorkFailedError
from perilune.sandbox.limits import SandboxLimits
from perilune.sandbox.mechanisms import WALLS, Mechanisms
from perilune.sandbox.wire import HEADER, frame

_START = """
import json, sys
sys.path.append(sys.argv[1])
from perilune.sandbox.supervisor import main
main()
"""
_GRACE = 20.0  # seconds beyond the limit until the keeper itself is given up
_MOST_STARTS = 60.0


class SandboxFailedError(WorkFailedError):
    """The sandbox, not what ran in it, has failed."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Which walls stand on this machine.

    Attributes:
        mechanisms: what they are made of.
        walls: each wall with the mechanisms that keep it; none where it is missing.
        reasons: of each mechanism that is missing, why.
    """

    mechanisms: Mechanisms
    walls: Mapping[str, tuple[str, ...]]
    reasons: Mapping[str, str]

    @property
    def missing(self) -> tuple[str, ...]:
        """Walls that do not stand."""
        return tuple(wall for wall, made_of in self.walls.items() if not made_of)


@dataclass(frozen=True, slots=True)
class Execution:
    """What became of one run.

    Attributes:
        cause: what ended it otherwise than with exit code 0: "error" when it did so itself, "timeout" (clock
            or processor), "memory", "output", "scratch" when it was killed for taking too much, "killed" by
            a signal else.
        exit_code: None when a signal ended it.
        signal: that ended it.
        output: standard output and error in the order they came; a line stands for what was cut.
        cut: bytes of output that are not kept.
        seconds: on the clock.
        files: the regular files of the scratch folder afterwards; those it began with where it was killed.
        left_out: names of what is no regular file, or did not fit.
    """

    cause: str
    exit_code: int | None
    signal: int | None
    output: str
    cut: int
    seconds: float
    files: Mapping[str, bytes] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return not self.cause


class Sandbox:
    """Runs Python code behind walls, one run at a time; nothing of a run is there in the next but its files.

    The code sees Python's own library and the files it is given, in a scratch folder that is its working
    directory. A fork-server makes a run cost milliseconds.

    Args:
        limits: what each run may use.
        without: mechanisms not to use ("namespaces", "own_user", "landlock", "seccomp"), to try what is left.
        allow_missing: walls that may be missing; by default, where one is, nothing is run.
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
        self._keeper: _Keeper | None = None
        self._lock = threading.Lock()  # one run at a time, whoever asks

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def capabilities(self) -> Capabilities:
        """Which walls stand here, found by trying.

        Raises:
            SandboxFailedError: when nothing can be run on this machine.
        """
        return self._started().capabilities

    def run(self, code: str, files: Mapping[str, bytes] | None = None) -> Execution:
        """Run `code` as a main program, in a folder with `files` (relative names).

        Raises:
            RequestError: when a wall is missing that may not be, or a file's name leads out.
            SandboxFailedError: when the sandbox fails.
        """
        files = dict(files or {})
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
                raise RequestError(f"{name!r} is no name of a file in the scratch folder")
        given = {name: base64.b64encode(one).decode() for name, one in files.items()}
        with self._lock:
            keeper = self._started()
            self._require_walls(keeper.capabilities)
            try:
                answer = keeper.ask({"code": code, "files": given}, self.limits.seconds + _GRACE)
                return _execution(answer, files)
            except SandboxFailedError:
                self.close()
                raise

    @property
    def process_id(self) -> int:
        """Of the process that all others descend from."""
        return self._started().process_id

    def close(self) -> None:
        """End its process; the next run starts another."""
        if self._keeper is not None:
            self._ended()
        self._keeper = None

    def _started(self) -> _Keeper:
        if self._keeper is None:
            self._keeper = _Keeper(self.limits, self._without)
            self._ended = weakref.finalize(self, self._keeper.close)
        return self._keeper

    def _require_walls(self, found: Capabilities) -> None:
        missing = [wall for wall in found.missing if wall not in self._allowed]
        if missing:
            self.close()
            reasons = "; ".join(f"{name}: {why}" for name, why in found.reasons.items())
            raise RequestError(
                f"this machine lacks walls of the sandbox: {', '.join(missing)} ({reasons})",
                where="sandbox",
                remedy="perilune sandbox audit says what each keeps; allow_missing runs without them",
            )


class _Keeper:
    """The process that forks runs, and the socket to it."""

    def __init__(self, limits: SandboxLimits, without: frozenset[str]) -> None:
        if sys.platform != "linux":
            raise SandboxFailedError(f"the sandbox is made of what Linux has; this is {sys.platform}")
        self._folder = tempfile.TemporaryDirectory(prefix="perilune-sandbox-", ignore_cleanup_errors=True)
        Path(self._folder.name).chmod(0o711)  # a user of its own passes through it
        self._socket, theirs = socket.socketpair()
        opening = {"limits": asdict(limits), "folder": self._folder.name, "without": sorted(without)}
        package = str(Path(perilune.__file__).parents[1])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-B", "-c", _START, package, json.dumps(opening)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=self._folder.name,
                env={"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "TZ": "UTC"},
                start_new_session=True,
            )
        try:
            self.capabilities = _capabilities(self._receive(_MOST_STARTS))
        except BaseException:
            self.close()
            raise

    @property
    def process_id(self) -> int:
        return self._process.pid

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """What the keeper answers."""
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(frame(request))
        except OSError as error:
            raise SandboxFailedError(f"the sandbox's process does not listen: {error}") from None
        return self._receive(seconds)

    def close(self) -> None:
        """Go away, which ends the run; then the keeper is killed, should it still be there."""
        self._socket.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.cleanup()

    def _receive(self, seconds: float) -> dict[str, Any]:
        self._socket.settimeout(seconds)
        try:
            document = json.loads(self._exactly(int(self._exactly(HEADER), 16)))
        except TimeoutError:
            raise SandboxFailedError(f"the sandbox's process does not answer within {seconds:g} s") from None
        except (OSError, ValueError) as error:
            raise SandboxFailedError(f"the sandbox's process is gone: {error}") from None
        if not isinstance(document, dict) or "failed" in document:
            raise SandboxFailedError(f"the sandbox cannot be built: {document}")
        return document

    def _exactly(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            data = self._socket.recv(min(size - len(found), 1 << 16))
            if not data:
                raise OSError("it closed the socket")
            found += data
        return bytes(found)


def _capabilities(found: Mapping[str, Any]) -> Capabilities:
    mechanisms = Mechanisms(**found["mechanisms"])
    return Capabilities(mechanisms, mechanisms.walls(), found["reasons"])


def _execution(answer: Mapping[str, Any], before: Mapping[str, bytes]) -> Execution:
    report = answer["report"]
    if "failed" in report:
        raise SandboxFailedError(f"the sandbox cannot be built: {report['failed']}")
    cause, seconds = answer["cause"], float(answer["seconds"])
    output = bytes.fromhex(answer["output"]).decode(errors="replace")
    if cause or "status" not in report:
        return Execution(cause or "killed", None, signal.SIGKILL, output, answer["cut"], seconds, before)
    exit_code = os.waitstatus_to_exitcode(report["status"])
    if exit_code < 0:
        cause = "timeout" if -exit_code == signal.SIGXCPU else "killed"
        return Execution(cause, None, -exit_code, output, answer["cut"], seconds, before)
    files = {name: base64.b64decode(content) for name, content in report["files"].items()}
    cause = "error" if exit_code else ""
    if exit_code and output.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        cause = "memory"
    return Execution(cause, exit_code, None, output, answer["cut"], seconds, files, tuple(report["left_out"]))
