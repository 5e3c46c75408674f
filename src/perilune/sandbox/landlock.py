"""Landlock: lets a process give up access to files for good.

https://docs.kernel.org/userspace-api/landlock.html. Works without privileges on Linux 5.13 and later.
"""

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
_PR_SET_NO_NEW_PRIVS = 38
_RULE_PATH_BENEATH = 1
_VERSION_FLAG = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 14
_READ = _READ_FILE | 1 << 3  # read files, list folders
_WRITE = _WRITE_FILE | _TRUNCATE | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 13  # remove, make, rename
_OF_FILES = _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # version of Landlock -> number of file rights
_NETWORK_SINCE, _TCP, _CONNECT, _RULE_PORT = 4, 0b11, 0b10, 2  # TCP: bind and connect
_SCOPE_SINCE, _SCOPES = 6, 0b11  # abstract sockets and signals to processes outside


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("descriptor", ctypes.c_int32))


class _Port(ctypes.Structure):
    _fields_ = (("allowed", ctypes.c_uint64), ("port", ctypes.c_uint64))


def landlock_version() -> int:
    """Return the kernel's version of Landlock; 0 if it has none."""
    if sys.platform != "linux":
        return 0
    return max(int(ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)), 0)


def can_limit_ports() -> bool:
    """Return whether Landlock can limit the TCP ports that a process connects to (Linux 6.7)."""
    return landlock_version() >= _NETWORK_SINCE


def restrict_files(
    readable: Iterable[str], writable: Iterable[str] = (), *, programs: bool = False, port: int | None = None
) -> bool:
    """Deny this process and its children all file access except beneath the given paths.

    Where the kernel supports it, TCP and signals to other processes are denied, too. Open descriptors stay
    usable. Returns False if the kernel has no Landlock.

    Args:
        readable: files, and folders whose files may be read and listed.
        writable: files that may also be written, and folders in which files may be created and removed.
        programs: whether the files beneath `readable` may be executed.
        port: a TCP port to which the process may connect.
    """
    version = landlock_version()
    if version == 0:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    rights = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    ruleset = _Ruleset(rights, _TCP, _SCOPES)
    size = 8 if version < _NETWORK_SINCE else 16 if version < _SCOPE_SINCE else 24
    handle = libc.syscall(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), 0)
    if handle < 0:
        return False
    for path in readable:
        _allow(libc, handle, path, _READ | (_EXECUTE if programs else 0))
    for path in writable:
        _allow(libc, handle, path, rights & (_READ | _WRITE))
    if port is not None and version >= _NETWORK_SINCE:
        rule = _Port(_CONNECT, port)
        libc.syscall(_ADD_RULE, handle, _RULE_PORT, ctypes.byref(rule), 0)
    sealed = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    restricted = sealed and libc.syscall(_RESTRICT_SELF, handle, 0) == 0
    os.close(handle)
    return bool(restricted)


def _allow(libc: ctypes.CDLL, handle: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # a path that does not exist needs no permission
    rule = _PathBeneath(rights if Path(path).is_dir() else rights & _OF_FILES, descriptor)
    libc.syscall(_ADD_RULE, handle, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    os.close(descriptor)
