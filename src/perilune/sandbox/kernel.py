"""Linux system calls that Python does not provide. Each raises OSError if it is refused."""

import ctypes
import os
import platform
import signal
from pathlib import Path

NEW_MOUNTS, NEW_NAMES, NEW_IPC = 0x20000, 0x4000000, 0x8000000
NEW_USERS, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SETUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_NO_NEW_PRIVILEGES, _SUBREAPER, _DROP_BOUNDING, _SECCOMP, _PARENT_DEATH_SIGNAL = 38, 36, 24, 22, 1
_CAPABILITIES_VERSION, _MOST_CAPABILITIES = 0x20080522, 64


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Enter new namespaces. A new PID namespace applies to the next child."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    texts = [text.encode() or None for text in (source, target, kind)]
    result = _libc.mount(*texts, ctypes.c_ulong(flags), options.encode() or None)
    _check(result, f"mount {target}")


def enter_root(path: str) -> None:
    """Make the mount point `path` the root of this mount namespace, and detach the old root."""
    os.chdir(path)
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(f"pivot_root is not known on {platform.machine()}")
    _check(_libc.syscall(number, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _DETACH), "umount")
    os.chdir("/")


def enter_user_namespace(inside: int) -> None:
    """Enter a user namespace in which only the user and group id `inside` exist, those of this process."""
    user, group = os.geteuid(), os.getegid()
    unshare(NEW_USERS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{inside} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{inside} {group} 1")


def drop_privileges() -> None:
    """Drop every capability and the ways to gain one."""
    for capability in range(_MOST_CAPABILITIES):
        _libc.prctl(_DROP_BOUNDING, capability, 0, 0, 0)  # fails if there is none to drop
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    _check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no_new_privs")


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    _check(_libc.prctl(_PARENT_DEATH_SIGNAL, number, 0, 0, 0), "parent death signal")


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent has ended."""
    _check(_libc.prctl(_SUBREAPER, 1, 0, 0, 0), "subreaper")


def signal_name(number: int) -> str:
    """Return the name of a signal, also of the real-time signals, most of which Python does not name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def filter_calls(program: bytes) -> None:
    """Apply a seccomp filter to this process and its children."""
    filter_program = _Program(len(program) // 8, program)
    _check(_libc.prctl(_SECCOMP, 2, ctypes.byref(filter_program), 0, 0), "seccomp")
