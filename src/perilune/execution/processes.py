"""Processes: identify them beyond their number, check whether they live, and kill a whole process tree."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

POLL_SECONDS = 0.02
UNKILLABLE_SECONDS = 10.0
ORPHAN_POLL_SECONDS = 0.5
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)


class Presence(StrEnum):
    """Whether something exists, as observed. UNKNOWN never justifies a destructive operation."""

    PRESENT = "present"
    ABSENT = "absent"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, distinguished from later ones with the same number.

    Attributes:
        host: the machine and its process namespace, in which the number is valid.
        boot_id: changes with every boot of the machine.
        starttime: clock ticks from boot to the start of the process (not wall-clock time).
    """

    host: str
    boot_id: str
    pid: int
    starttime: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Return the identity of a living process, or None; a zombie does not count as living."""
        started = _read_start_time(pid)
        return None if started is None else cls(host_id(), boot_id(), pid, started)

    def presence(self) -> Presence:
        """Return whether the process lives; UNKNOWN if it belongs to another machine or process namespace."""
        if self.host != host_id():
            return Presence.UNKNOWN
        if self.boot_id != boot_id():
            return Presence.ABSENT
        return Presence.PRESENT if _read_start_time(self.pid) == self.starttime else Presence.ABSENT

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to exactly this process; False if it is gone or on another machine."""
        if self.presence() is not Presence.PRESENT:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False


def host_id() -> str:
    """Return an id of this machine and process namespace: machine id, then the namespace's inode."""
    machine = _first_line("/etc/machine-id", "/var/lib/dbus/machine-id") or os.uname().nodename
    with contextlib.suppress(OSError):
        return f"{machine}/{Path('/proc/self/ns/pid').readlink()}"
    return machine


def boot_id() -> str:
    """Return a string that changes with every boot."""
    return _first_line("/proc/sys/kernel/random/boot_id") or f"{psutil.boot_time():.0f}"


def find_marked(variable: str, value: str) -> list[psutil.Process]:
    """Return the processes of this user that were started with `variable=value` in their environment.

    A child inherits the mark even if it leaves its parent's process group and session.
    """
    marked = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(variable) == value:
                marked.append(process)
    return marked


def kill_all(find: Callable[[], Iterable[psutil.Process]], *, grace: float) -> bool:
    """End every process that `find` returns: TERM, up to `grace` seconds, then KILL.

    `find` is called again after every round, so that processes started meanwhile do not escape. The parents
    still have to collect the exit statuses.

    Returns:
        True once none is left; False if some survive KILL for `UNKILLABLE_SECONDS` (as on a hung disk).
    """
    if not (victims := _keep_living(find())):
        return True
    if grace > 0:
        _signal(victims, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline:
        if not _keep_living(find()):
            return True
        time.sleep(POLL_SECONDS)
    deadline = time.monotonic() + UNKILLABLE_SECONDS
    while victims := _keep_living(find()):
        if time.monotonic() > deadline:
            return False
        _signal(victims, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return True


def die_with_parent(parent: int) -> None:
    """Kill this process as soon as its parent has ended, for whatever reason.

    Args:
        parent: the parent's process number, passed by the parent: it may have ended before this call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=watch, name="orphan-watch", daemon=True).start()


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants (Linux), so that all of them can be found."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _keep_living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    living = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _read_start_time(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _read_start_time_from_ps(pid)
    except (ProcessLookupError, PermissionError):
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def _read_start_time_from_ps(pid: int) -> int | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time() * 100)
    except psutil.Error:
        return None


def _first_line(*paths: str) -> str:
    for path in paths:
        with contextlib.suppress(OSError):
            if text := Path(path).read_text().strip():
                return text
    return ""
