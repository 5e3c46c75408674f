"""What a scorer's process may do: read Python's own files, compute, and answer.

Three layers, because scorers run code they were not meant to run: resource limits and Landlock, kept by the
kernel, and an audit hook that refuses files, processes, sockets and signals inside Python (also where the
kernel has no Landlock, and for root, whom the limit on processes does not bind). A determined attacker who
runs code in the process can reach around the hook; keep `strict: true`, which lets no code in.
"""

from __future__ import annotations

import os
import resource
import site
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.sandbox.landlock import give_up_files
from perilune.sandbox.limits import lower

# fmt: off
_REFUSED_EVENTS = frozenset({
    "ctypes.dlopen", "ctypes.dlsym", "os.chmod", "os.chown", "os.exec", "os.fork", "os.forkpty", "os.kill",
    "os.killpg", "os.link", "os.mkdir", "os.posix_spawn", "os.remove", "os.rename", "os.rmdir", "os.setxattr",
    "os.spawn", "os.startfile", "os.symlink", "os.system", "os.truncate", "os.utime", "pty.spawn",
    "resource.prlimit", "resource.setrlimit", "signal.pthread_kill", "socket.__new__", "socket.bind",
    "socket.connect", "subprocess.Popen", "syslog.openlog",
})
# fmt: on
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True, slots=True)
class Limits:
    """What one scorer process may use.

    Attributes:
        start_seconds: until the environment is built.
        item_seconds: wall clock, and CPU, for one transcript.
        batch_seconds: wall clock for one call of `score`; None for no limit beyond the items'.
        memory_bytes: address space beyond what the built environment takes.
        open_files: descriptors beyond the standard three and the pipe of answers.
        answer_bytes: length of one outcome on the wire, and of what may be written beside it.
    """

    start_seconds: float = 60.0
    item_seconds: float = 10.0
    batch_seconds: float | None = None
    memory_bytes: int = 1 << 30
    open_files: int = 32
    answer_bytes: int = 1 << 20


class Confinement:
    """Confines this process; cannot be undone.

    The audit hook refuses only while `armed`, that is while a scorer runs.
    """

    def __init__(self, limits: Limits) -> None:
        self.armed = False
        self._limits = limits
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        lower(resource.RLIMIT_NOFILE, 4 + limits.open_files)
        lower(resource.RLIMIT_NPROC, 0)
        if (taken := _address_space()) is not None:
            lower(resource.RLIMIT_AS, taken + limits.memory_bytes)
        give_up_files(_readable_paths())
        sys.addaudithook(self._refuse)

    def allow_cpu(self) -> None:
        """Grant the CPU time of one more item from now on."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        until = int(usage.ru_utime + usage.ru_stime + self._limits.item_seconds) + 2
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (until, hard))

    def _refuse(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event in _REFUSED_EVENTS or event.startswith("shutil."):
            raise PermissionError(f"a scorer may not use {event}")
        if event == "open" and arguments[2] & _WRITING and arguments[0] != os.devnull:
            raise PermissionError("a scorer may not write files")


def _address_space() -> int | None:
    """Bytes of address space this process takes; None where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None


def _readable_paths() -> list[str]:
    own = {sys.prefix, sys.base_prefix, *filter(None, sys.path), *site.getsitepackages()}
    return [*sorted(own), "/usr", "/lib", "/lib64", "/etc/localtime", "/dev/null", "/dev/urandom"]
