"""Runs third-party programs, each in its own folder, with one TCP port to which it may connect.

A program is less confined than code in the sandbox, because it needs its packages, other programs and a
server on this machine. The kernel denies it other files and TCP ports (Landlock) and every privilege, and
limits its memory, CPU time and files. It inherits no environment variables except PATH, so it has no secrets.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from perilune.errors import RequestError, WorkFailedError
from perilune.sandbox.folders import OwnedFolder
from perilune.sandbox.landlock import can_limit_ports

_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from perilune.sandbox.program_server import main
main(sys.argv[2:])
"""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/opt", "/etc", "/proc", "/dev/null", "/dev/urandom")
_MAX_ERROR_BYTES = 2000  # bytes of standard error that are kept


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """Limits of one program.

    Attributes:
        cpu_seconds: CPU time of each of its processes.
        memory_bytes: address space of each of its processes.
        file_bytes: size of each file, and of its output.
        confined: deny it all files but Python's, the system's and its own folder, and all TCP ports but one.
    """

    cpu_seconds: int = 60
    memory_bytes: int = 4 << 30
    file_bytes: int = 16 << 20
    confined: bool = True


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a program.

    Attributes:
        code: exit code; negative for a signal.
        output: what it wrote to standard output, if that is a file.
        errors: the end of what it wrote to standard error.
    """

    code: int
    output: str
    errors: str


class Streams(NamedTuple):
    """Descriptors of a program's standard input and output."""

    given: int
    output: int

    @classmethod
    def of_text(cls, text: str) -> Streams:
        """Return the input `text`, and an output that is read at the end."""
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output:
            given.write(text.encode())
            given.seek(0)
            return cls(os.dup(given.fileno()), os.dup(output.fileno()))


@dataclass(slots=True, eq=False)
class Program:
    """A running program.

    Attributes:
        keeper: process that runs it, and ends it at a signal TERM.
        has_ended: set when it and its children are gone.
    """

    keeper: int
    has_ended: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """Kill it if it still runs, and wait until it and its children are gone."""
        with contextlib.suppress(ProcessLookupError):
            if not self.has_ended.is_set():
                os.kill(self.keeper, signal.SIGTERM)
        self.has_ended.wait()


class Programs:
    """Starts programs.

    Args:
        preload: modules that Python programs share; they are imported once and forked with each program.

    Raises:
        RequestError: when this is not Linux, or `limits.confined` needs a newer kernel.
    """

    def __init__(self, limits: ProgramLimits, preload: Sequence[str] = ()) -> None:
        if sys.platform != "linux":
            raise RequestError("programs can be started on Linux only", where="environment.id")
        if limits.confined and not can_limit_ports():
            raise RequestError(
                "this machine's kernel cannot limit the ports of a program (Landlock, Linux 6.7)",
                where="environment.confined",
                remedy="set confined: false if you trust the program with this machine's files and network",
            )
        self._limits, self._preload = limits, tuple(preload)
        self._control, child_end = socket.socketpair()
        self._lock = threading.Lock()
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-s", "-c", _START, json.dumps(sys.path), *preload],
            stdin=child_end.fileno(),
            stdout=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
        )
        child_end.close()
        self._answers = self._control.makefile("rb")

    def start(
        self,
        command: Sequence[str],
        streams: Streams,
        variables: Mapping[str, str],
        on_end: Callable[[Ending], None],
        *,
        port: int | None = None,
        readable: Sequence[str] = (),
    ) -> Program:
        """Start a program.

        Args:
            command: "python" is this interpreter; other names are looked up in PATH.
            streams: its standard input and output, which are closed here.
            variables: its environment variables, besides the usual ones.
            on_end: called in another thread when it and all its children have ended.
            port: the TCP port that it may connect to.
            readable: further files and folders that it may read.

        Raises:
            RequestError: when the command does not exist, or a module of `preload` cannot be imported.
        """
        with ExitStack() as stack:
            given = stack.enter_context(os.fdopen(streams.given, "rb"))
            output = stack.enter_context(os.fdopen(streams.output, "rb"))
            errors = stack.enter_context(tempfile.TemporaryFile())
            executable = _find(command[0])
            owned = OwnedFolder("perilune-program-")
            stack.callback(owned.remove)
            folder = owned.path
            request = {
                "command": [executable, *command[1:]],
                "is_preloaded": bool(self._preload) and executable == sys.executable,
                "variables": {**_variables(folder), **variables},
                "folder": folder,
                "readable": [*_readable(executable), *readable] if self._limits.confined else None,
                "port": port,
                "cpu_seconds": self._limits.cpu_seconds,
                "memory_bytes": self._limits.memory_bytes,
                "file_bytes": self._limits.file_bytes,
            }
            report, their_report = os.pipe()
            reports = stack.enter_context(os.fdopen(report, "rb"))
            descriptors = [given.fileno(), output.fileno(), errors.fileno(), their_report]
            answer = b""
            with self._lock, contextlib.suppress(ConnectionError):  # if the server has ended
                socket.send_fds(self._control, [json.dumps(request).encode() + b"\n"], descriptors)
                answer = self._answers.readline()
            os.close(their_report)
            if not answer and not self._preload:
                raise WorkFailedError("the process that starts programs has ended")
            if not answer:
                raise RequestError(
                    f"the modules to preload cannot be imported: {', '.join(self._preload)}",
                    where="environment.preload",
                    remedy="install them in Perilune's environment, or remove them",
                )
            program = Program(json.loads(answer)["keeper"])
            given.close()
            resources = stack.pop_all()

        def watch() -> None:
            with resources:
                document = reports.read()
                status = json.loads(document)["status"] if document else signal.SIGKILL
                text = _read_text(output) if output.seekable() else ""
                ending = Ending(os.waitstatus_to_exitcode(status), text, _read_text(errors, _MAX_ERROR_BYTES))
            program.has_ended.set()
            on_end(ending)

        threading.Thread(target=watch, name="program", daemon=True).start()
        return program

    def close(self) -> None:
        """End all programs. May be called repeatedly."""
        self._server.kill()
        self._server.wait()
        self._answers.close()
        self._control.close()


def _read_text(file: IO[bytes], most: int | None = None) -> str:
    """Return the text of a file, or of its last `most` bytes."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0 if most is None else max(size - most, 0))
    return file.read().decode(errors="replace")


def _find(name: str) -> str:
    program = sys.executable if name in ("python", "python3") else shutil.which(name)
    if program is None:
        remedy = "give its absolute path, or install it"
        raise RequestError(f"there is no program {name!r}", where="environment.command", remedy=remedy)
    return program


def _variables(folder: str) -> dict[str, str]:
    return {
        "HOME": folder,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "TMPDIR": folder,
    }


def _readable(executable: str) -> list[str]:
    """Return the system's files, and those of the interpreter and its packages."""
    own = {sys.prefix, sys.base_prefix, *(path for path in sys.path if path)}
    own |= {str(Path(executable).parent.parent), str(Path(executable).resolve().parent.parent)}
    return [*_SYSTEM, *sorted(own - {"/"})]
