"""Confines a scorer's process: it may read Python's own files, compute, and answer.

The kernel enforces this (`perilune.sandbox.confinement`). In addition, an audit hook names the refused
operation. On systems other than Linux only the hook applies, and code in the process can disable it.
"""

import os
import sys
from dataclasses import dataclass
from typing import Any

from perilune.sandbox.confinement import confine, forbid_processes
from perilune.sandbox.limits import allow_cpu

# Audit events of Python that a scorer has no reason to raise, see `_refuse`.
_EVENTS = """
ctypes.dlopen ctypes.dlsym os.chmod os.chown os.exec os.fork os.forkpty os.kill os.killpg os.link os.mkdir
os.posix_spawn os.remove os.rename os.rmdir os.setxattr os.spawn os.startfile os.symlink os.system os.truncate
os.utime pty.spawn resource.prlimit resource.setrlimit signal.pthread_kill socket.bind socket.connect
subprocess.Popen syslog.openlog
"""
_REFUSED_EVENTS = frozenset(_EVENTS.split())
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True, slots=True)
class ScorerLimits:
    """Limits of one scorer process.

    Attributes:
        start_seconds: time to build the environment.
        item_seconds: wall clock and CPU time for one transcript.
        batch_seconds: wall clock for one call of `score`; None for no limit.
        memory_bytes: address space beyond that of the built environment.
        open_files: file descriptors beyond those of the built environment.
        answer_bytes: maximum size of one answer of the process, and of its standard error.
    """

    start_seconds: float = 60.0
    item_seconds: float = 10.0
    batch_seconds: float | None = None
    memory_bytes: int = 1 << 30
    open_files: int = 32
    answer_bytes: int = 1 << 24  # room for the questions of one `ask_all` about a million tokens


class Confinement:
    """Confines this process and its children permanently.

    Attributes:
        armed: whether the audit hook refuses operations; True while a scorer runs.
        missing: protections that this machine's kernel does not provide (`perilune.sandbox.confinement`).
    """

    def __init__(self, limits: ScorerLimits) -> None:
        self.armed = False
        self._limits = limits
        self.missing = confine(memory_bytes=limits.memory_bytes, open_files=limits.open_files)
        sys.addaudithook(self._refuse)

    def forbid_processes(self) -> None:
        """Forbid this process to start others."""
        forbid_processes()

    def allow_item(self) -> None:
        """Grant the CPU time of one more item, and arm the audit hook."""
        self.armed = False
        allow_cpu(self._limits.item_seconds + 1)
        self.armed = True

    def _refuse(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event in _REFUSED_EVENTS or event.startswith("shutil."):
            raise PermissionError(f"a scorer may not use {event}")
        if event == "open" and arguments[2] & _WRITE_FLAGS and arguments[0] != os.devnull:
            raise PermissionError("a scorer may not write files")
