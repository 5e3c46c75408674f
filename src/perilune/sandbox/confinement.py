"""Confines a process that keeps its packages and works on untrusted input, such as a scorer.

Unlike code in a sandbox, such a process has no root, user or namespaces of its own. The kernel denies it the
network, other processes, programs, keys, clocks and namespaces (seccomp), files (Landlock), and every
privilege, even for root. After `confine` the process can still fork; `forbid_processes` ends that.
"""

import os
import resource
import site
import sys
from collections.abc import Sequence
from pathlib import Path

from perilune.sandbox import kernel
from perilune.sandbox.landlock import restrict_files
from perilune.sandbox.limits import lower_limit
from perilune.sandbox.seccomp import call_filter, single_process_filter


def confine(*, memory_bytes: int, open_files: int, readable: Sequence[str] | None = None) -> tuple[str, ...]:
    """Confine this process and its children for good. They cannot write files.

    Args:
        memory_bytes: address space that they may take beyond the current one.
        open_files: number of descriptors beyond those open now.
        readable: files and folders that they may read; None: Python's own, with its packages.

    Returns:
        The walls that this machine lacks: "privileges", "files", "calls".
    """
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_FSIZE, 0)
    lower_limit(resource.RLIMIT_NOFILE, _highest_descriptor() + 1 + open_files)
    if (taken := _address_space()) is not None:
        lower_limit(resource.RLIMIT_AS, taken + memory_bytes)
    if sys.platform != "linux":
        return ("privileges", "files", "calls")
    lower_limit(resource.RLIMIT_MEMLOCK, 0)
    lower_limit(resource.RLIMIT_MSGQUEUE, 0)
    missing = []
    try:
        kernel.drop_privileges()
    except OSError:
        missing.append("privileges")
    if not restrict_files(_python_paths() if readable is None else readable):
        missing.append("files")
    if not _filter_calls(call_filter(among_others=True, no_processes=False)):
        missing.append("calls")
    return tuple(missing)


def forbid_processes() -> None:
    """Forbid this process to start children, and to send signals to other processes."""
    lower_limit(resource.RLIMIT_NPROC, 0)
    if sys.platform == "linux":
        _filter_calls(single_process_filter(os.getpid()))


def _filter_calls(program: bytes) -> bool:
    try:
        kernel.filter_calls(program)
    except OSError:
        return False
    return bool(program)


def _highest_descriptor() -> int:
    try:
        return max(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208
    except OSError:
        return 3


def _address_space() -> int | None:
    """Return the address space of this process in bytes; None if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None


def _python_paths() -> list[str]:
    own = {sys.prefix, sys.base_prefix, *filter(None, sys.path), *site.getsitepackages()}
    return [*sorted(own), "/usr", "/lib", "/lib64", "/etc/localtime", "/dev/null", "/dev/urandom"]
