"""What a scorer's process may do: read Python's own files, compute, and answer.

The kernel enforces it (`perilune.sandbox.confinement`). An audit hook on top names what was refused. On
systems other than Linux the hook is all there is, and code that runs in the process can disarm it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from perilune.sandbox.confinement import confine, forbid_processes
from perilune.sandbox.limits import allow_cpu

# fmt: off
_REFUSED_EVENTS = frozenset({
    "ctypes.dlopen", "ctypes.dlsym", "os.chmod", "os.chown", "os.exec", "os.fork", "os.forkpty", "os.kill",
    "os.killpg", "os.link", "os.mkdir", "os.posix_spawn", "os.remove", "os.rename", "os.rmdir", "os.setxattr",
    "os.spawn", "os.startfile", "os.symlink", "os.system", "os.truncate", "os.utime", "pty.spawn",
    "resource.prlimit", "resource.setrlimit", "signal.pthread_kill", "socket.bind", "socket.connect",
    "subprocess.Popen", "syslog.openlog",
})
# fmt: on
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True, slots=True)
class ScorerLimits:
    """What one scorer process may use.

    Attributes:
        start_seconds: until the environment is built.
        item_seconds: wall clock, and CPU, for one transcript.
        batch_seconds: wall clock for one call of `score`; None for no limit beyond the items'.
        memory_bytes: address space beyond what the built environment takes.
        open_files: descriptors beyond those that the built environment has.
        answer_bytes: length of one outcome on the wire, and of what may be written beside it.
    """

    start_seconds: float = 60.0
    item_seconds: float = 10.0
    batch_seconds: float | None = None
    memory_bytes: int = 1 << 30
    open_files: int = 32
    answer_bytes: int = 1 << 20


class Confinement:
    """Confines this process and its children; cannot be undone.

    The audit hook refuses only while `armed`, that is while a scorer runs.

    Attributes:
        missing: walls that the kernel of this machine doesn't offer.
    """

    def __init__(self, limits: ScorerLimits) -> None:
        self.armed = False
        self._limits = limits
        self.missing = confine(memory_bytes=limits.memory_bytes, open_files=limits.open_files)
        sys.addaudithook(self._refuse)

    def forbid_processes(self) -> None:
        """Let this process, which judges, have no children."""
        forbid_processes()

    def allow_item(self) -> None:
        """Grant the CPU time of one more item from now on, and refuse everything else."""
        self.armed = False
        allow_cpu(self._limits.item_seconds + 1)
        self.armed = True

    def _refuse(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event in _REFUSED_EVENTS or event.startswith("shutil."):
            raise PermissionError(f"a scorer may not use {event}")
        if event == "open" and arguments[2] & _WRITING and arguments[0] != os.devnull:
            raise PermissionError("a scorer may not write files")
