"""The steps from the supervisor's child to untrusted code. Each step gives up rights, and none can be undone.

The supervisor forks the *launcher*, which reads the request and creates namespaces. It forks their *init*
process, which enters the new root, places the files and drops its user. That forks the *code*, under the
limits and the call filter. Only the init process reports, and only when the code has ended.
"""

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
from perilune.sandbox.control_group import be_killed_first
from perilune.sandbox.landlock import restrict_files
from perilune.sandbox.limits import SandboxLimits, lower_limit
from perilune.sandbox.mechanisms import Mechanisms
from perilune.sandbox.own_root import enter_own_root, readable_paths
from perilune.sandbox.program import run_program
from perilune.sandbox.seccomp import call_filter

SANDBOX_USER_ID = 1000
MAX_DESCRIPTORS = 128  # descriptor limit of the supervisor, inherited by its children
_PAGE_BYTES = resource.getpagesize()
_MAX_DEPTH = 8  # nesting of folders from which files are collected


@dataclass(frozen=True, slots=True)
class Run:
    """The settings and descriptors of one run.

    Attributes:
        folder: an empty folder for this sandbox alone.
        user: user id of the code, if `mechanisms.own_user`.
        taken: address space of Python itself in bytes; the memory limit applies beyond it.
        output: descriptor for the code's output.
        report: descriptor for the report of the init process.
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
        """The scratch folder of a run without its own root."""
        return f"{self.folder}/scratch"


def launch(run: Run, request: Mapping[str, Any]) -> NoReturn:
    """Create namespaces and their init process, and wait for it."""
    os.setpgid(0, 0)
    try:
        if run.mechanisms.control_group:
            be_killed_first()
        if run.mechanisms.own_users:
            kernel.enter_user_namespace(SANDBOX_USER_ID)
        if run.mechanisms.namespaces:
            kernel.unshare(
                kernel.NEW_MOUNTS | kernel.NEW_PIDS | kernel.NEW_NETWORK | kernel.NEW_IPC | kernel.NEW_NAMES
            )
        kernel.die_with_parent()
    except OSError as error:
        _send_report(run.report, {"failed": str(error)})
        os._exit(1)
    if os.fork() == 0:
        _init(run, request)
    os.close(run.output)
    os.close(run.report)
    os.wait()
    os._exit(0)


def _init(run: Run, request: Mapping[str, Any]) -> NoReturn:
    try:
        _enter_scratch(run, request["files"])
        errors, errors_end = os.pipe()
        code = os.fork()
        if code == 0:
            os.close(errors)
            _run_code(run, errors_end, request["code"])
        with contextlib.suppress(OSError):
            os.setpgid(code, code)
        os.close(errors_end)
        os.close(run.output)
        if refused := os.read(errors, 1000):
            raise OSError(refused.decode(errors="replace"))
        status = _wait_for(code)
        _kill_rest(code)
        report = {"status": status, "files": _collect_files(run.limits)}
    except Exception as error:
        report = {"failed": f"{type(error).__name__}: {error}"}
    _send_report(run.report, report)
    os._exit(0)


def _enter_scratch(run: Run, files: Mapping[str, str]) -> None:
    """Enter the scratch folder, drop the user, and place the files."""
    mechanisms, limits = run.mechanisms, run.limits
    if mechanisms.namespaces:
        socket.sethostname("sandbox")
        enter_own_root(run.folder, limits.scratch_bytes, limits.scratch_files)
        readable, scratch = ["/"], str(Path.cwd())
    else:
        os.chdir(run.scratch)
        readable, scratch = readable_paths(), run.scratch
    if mechanisms.own_user:
        os.setgroups([])
        os.setresgid(run.user, run.user, run.user)
        os.setresuid(run.user, run.user, run.user)
    kernel.drop_privileges()
    kernel.die_with_parent()  # after the change of user, which would undo it
    if mechanisms.landlock and not restrict_files(readable, [scratch, "/dev/null", "/dev/full"]):
        raise OSError("the kernel accepted Landlock before and refuses it now")
    for name, content in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(content))


def _run_code(run: Run, errors: int, code: str) -> NoReturn:
    """Apply the limits and the call filter to this process, and run the code."""
    try:
        os.setpgid(0, 0)
        kernel.die_with_parent()
        if not run.mechanisms.namespaces:  # report the process group to kill before anything can fail
            os.write(run.report, b"%d\n" % os.getpid())
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(run.output, 1)
        os.dup2(run.output, 2)
        os.dup2(errors, 3)
        os.closerange(4, MAX_DESCRIPTORS)
        _apply_limits(run)
        if run.mechanisms.seccomp:
            among_others, no_processes = not run.mechanisms.namespaces, not run.mechanisms.counted
            kernel.filter_calls(call_filter(among_others=among_others, no_processes=no_processes))
    except BaseException as error:
        os.write(3, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.close(3)
    run_program(code)


def _apply_limits(run: Run) -> None:
    limits = run.limits
    # In a user namespace the launcher and the init process count; otherwise only the init process does.
    others = 2 if run.mechanisms.own_users else 1
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_FSIZE, limits.scratch_bytes)
    lower_limit(resource.RLIMIT_AS, run.taken + limits.memory_bytes)
    lower_limit(resource.RLIMIT_NOFILE, limits.open_files)
    lower_limit(resource.RLIMIT_MEMLOCK, 0)
    lower_limit(resource.RLIMIT_MSGQUEUE, 0)
    lower_limit(resource.RLIMIT_CPU, limits.cpu_seconds + 1)
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds + 1))
    if run.mechanisms.counted:
        lower_limit(resource.RLIMIT_NPROC, limits.processes + others)


def _wait_for(code: int) -> int:
    """Return the wait status of the code. Orphans that end earlier are reaped."""
    while True:
        process, status = os.wait()
        if process == code:
            return status


def _kill_rest(code: int) -> None:
    """Kill all processes that the code left behind."""
    if os.getpid() == 1:  # init of a PID namespace: only its own processes are in reach
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(code, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _collect_files(limits: SandboxLimits) -> dict[str, str]:
    """Return the regular files of the scratch folder, in Base64, without those that exceed the limits."""
    files: dict[str, str] = {}
    room, count = limits.scratch_bytes, limits.scratch_files
    for path in _walk(Path(), _MAX_DEPTH):
        with contextlib.suppress(OSError, UnicodeError):
            str(path).encode()
            status = path.lstat()
            # The next run writes a file with holes in full, in whole pages.
            size = -(-status.st_size // _PAGE_BYTES) * _PAGE_BYTES
            if stat.S_ISREG(status.st_mode) and size <= room and len(files) < count:
                files[str(path)] = base64.b64encode(path.read_bytes()).decode()
                room -= size
    return files


def _walk(folder: Path, deepest: int) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and deepest:
            try:
                yield from _walk(path, deepest - 1)
            except OSError:
                yield path  # the folder cannot be listed
        else:
            yield path


def _send_report(report: int, document: Mapping[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(report, "wb") as stream:
        stream.write(json.dumps(document).encode())
