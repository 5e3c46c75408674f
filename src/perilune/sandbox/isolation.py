"""From the keeper's child to untrusted code: each step gives something up, and none can be taken back.

The keeper forks the *porter*, which reads the request and takes namespaces; it forks the *first* process
of them, which enters the new root, places the files and becomes nobody; and that forks the *code*, over which
the limits and the filter are laid. Only the first one reports, and only when the code has ended.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
import signal
import socket
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from perilune.sandbox import kernel
from perilune.sandbox.landlock import give_up_files
from perilune.sandbox.limits import SandboxLimits, lower
from perilune.sandbox.mechanisms import Mechanisms
from perilune.sandbox.own_root import enter_own_root, readable_places
from perilune.sandbox.program import run_program
from perilune.sandbox.seccomp import call_filter

USER_INSIDE = 1000
MOST_DESCRIPTORS = 128  # that the keeper, and so the code before it closes them, can hold
_DEEPEST = 8  # folders within folders whose files are brought back


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: what it is made of, and the ends of its pipes.

    Attributes:
        folder: an empty one that nobody else uses.
        user: whom the code runs as, where `mechanisms.own_user`.
        taken: bytes of address space that Python takes by itself.
        output: descriptor that the code's output goes to.
        report: descriptor that the first process tells how it ended on.
    """

    mechanisms: Mechanisms
    limits: SandboxLimits
    folder: str
    user: int
    taken: int
    output: int
    report: int

    @property
    def scratch(self) -> str:
        """The scratch folder, where it has no root of its own."""
        return f"{self.folder}/scratch"


def porter(cell: Cell, request: Mapping[str, Any]) -> NoReturn:
    """Take namespaces, and wait for their first process."""
    os.setpgid(0, 0)
    try:
        if cell.mechanisms.own_users:
            kernel.own_users(USER_INSIDE)
        if cell.mechanisms.namespaces:
            kernel.unshare(
                kernel.NEW_MOUNTS | kernel.NEW_PIDS | kernel.NEW_NETWORK | kernel.NEW_IPC | kernel.NEW_NAMES
            )
    except OSError as error:
        _tell(cell.report, {"failed": str(error)})
        os._exit(1)
    if os.fork() == 0:
        _first(cell, request)
    os.close(cell.output)
    os.close(cell.report)
    os.wait()
    os._exit(0)


def _first(cell: Cell, request: Mapping[str, Any]) -> NoReturn:
    try:
        _settle(cell, request["files"])
        told, armed = os.pipe()
        code = os.fork()
        if code == 0:
            os.close(told)
            _become_code(cell, armed, request["code"])
        with contextlib.suppress(OSError):
            os.setpgid(code, code)
        os.close(armed)
        os.close(cell.output)
        if refused := os.read(told, 1000):
            raise OSError(refused.decode(errors="replace"))
        status = _wait_for(code)
        _end_others(code)
        report = {"status": status, **_brought_back(cell.limits)}
    except Exception as error:
        report = {"failed": f"{type(error).__name__}: {error}"}
    _tell(cell.report, report)
    os._exit(0)


def _settle(cell: Cell, files: Mapping[str, str]) -> None:
    """Go where the code will be, place its files, and become nobody."""
    mechanisms, limits = cell.mechanisms, cell.limits
    if mechanisms.namespaces:
        socket.sethostname("sandbox")
        enter_own_root(cell.folder, limits.scratch_bytes, limits.scratch_files)
        readable, scratch = ["/"], str(Path.cwd())
    else:
        os.chdir(cell.scratch)
        readable, scratch = readable_places(), cell.scratch
    if mechanisms.own_user:
        os.setgroups([])
        os.setresgid(cell.user, cell.user, cell.user)
        os.setresuid(cell.user, cell.user, cell.user)
    kernel.give_up_privileges()
    if mechanisms.landlock and not give_up_files(readable, [scratch, "/dev/null", "/dev/full"]):
        raise OSError("Landlock stood before and is refused now")
    for name, content in files.items():
        place = Path(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(base64.b64decode(content))


def _become_code(cell: Cell, armed: int, code: str) -> NoReturn:
    """Lay the limits and the filter over this process, and run the code."""
    try:
        os.setpgid(0, 0)
        if not cell.mechanisms.namespaces:  # the group to be killed, told before anything can go wrong
            os.write(cell.report, b"%d\n" % os.getpid())
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(cell.output, 1)
        os.dup2(cell.output, 2)
        os.dup2(armed, 3)
        os.closerange(4, MOST_DESCRIPTORS)
        _limit(cell)
        if cell.mechanisms.seccomp:
            kernel.filter_calls(
                call_filter(
                    among_others=not cell.mechanisms.namespaces,
                    no_processes=not cell.mechanisms.counted,
                    no_shared_memory=True,
                )
            )
    except BaseException as error:
        os.write(3, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.close(3)
    run_program(code)


def _limit(cell: Cell) -> None:
    limits = cell.limits
    # In namespaces of a user's own the porter and the first process count too, else the first one does.
    others = 2 if cell.mechanisms.own_users else 1
    lower(resource.RLIMIT_CORE, 0)
    lower(resource.RLIMIT_FSIZE, limits.scratch_bytes)
    lower(resource.RLIMIT_AS, cell.taken + limits.memory_bytes)
    lower(resource.RLIMIT_NOFILE, limits.open_files)
    lower(resource.RLIMIT_MEMLOCK, 0)
    lower(resource.RLIMIT_MSGQUEUE, 0)
    lower(resource.RLIMIT_CPU, limits.cpu_seconds + 1)
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds + 1))
    if cell.mechanisms.counted:
        lower(resource.RLIMIT_NPROC, limits.processes + others)


def _wait_for(code: int) -> int:
    """The wait status of the code; orphans that end before it are buried."""
    while True:
        process, status = os.wait()
        if process == code:
            return status


def _end_others(code: int) -> None:
    """Kill what the code has left behind."""
    if os.getpid() == 1:  # the first of a namespace: nobody else is in reach
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(code, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _brought_back(limits: SandboxLimits) -> dict[str, Any]:
    """Regular files of the scratch folder, and the names of what is none or does not fit."""
    files: dict[str, str] = {}
    left_out: list[str] = []
    room, count = limits.scratch_bytes, limits.scratch_files
    for path in _walk(Path(), _DEEPEST):
        name = str(path)
        try:
            name.encode()
            found = path.lstat()
            if not stat.S_ISREG(found.st_mode) or found.st_size > room or len(files) >= count:
                raise OSError
            files[name] = base64.b64encode(path.read_bytes()).decode()
            room -= found.st_size
        except (OSError, UnicodeError):
            left_out.append(ascii(name)[:200])
    return {"files": files, "left_out": left_out[: limits.scratch_files]}


def _walk(folder: Path, deepest: int) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and deepest:
            try:
                yield from _walk(path, deepest - 1)
            except OSError:
                yield path  # it cannot be listed
        else:
            yield path


def _tell(report: int, document: Mapping[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(report, "wb") as stream:
        stream.write(json.dumps(document).encode())
