"""The watchdog ends a process that makes no progress, and writes the stacks of all threads.

A hanging run looks like a working one. Each wait therefore has a name and a deadline. After the deadline the
process ends, with the stacks in its log and in stacks.txt if `leave_stacks_in` was called.
"""

from __future__ import annotations

import faulthandler
import math
import os
import threading
import time
from pathlib import Path
from typing import ClassVar

STALL = 1800.0  # seconds without progress
GRACE = 60.0  # further seconds until faulthandler ends C code that holds the GIL
EXIT_CODE = 1
STACKS = "stacks.txt"  # the file of stacks; its first line names the wait
_STDERR = 2


def leave_stacks_in(directory: Path) -> None:
    """Write the stacks of a stall to `directory`/stacks.txt, which is created empty now."""
    Waiting.stacks = os.open(directory / STACKS, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)


def stall_in(directory: Path) -> str:
    """The wait at which a process stalled, from stacks.txt in `directory`; "" if it did not stall."""
    path = directory / STACKS
    first = path.read_text(errors="replace").partition("\n")[0] if path.exists() else ""
    if first.startswith("Timeout"):  # written by faulthandler
        return "code that holds the interpreter's lock: nothing has happened"
    return first.rstrip(":")


class Waiting:
    """`with Waiting("sampling")` ends the process if the block makes no progress for `seconds`.

    The process ends at once with code 1 and without clean-up, which might hang too. Its child processes die
    with it. Waits may be nested; the end of an inner wait disarms faulthandler.

    Args:
        name: name of the wait in the log.
        seconds: longest time between two calls of `progress`.

    Attributes:
        stacks: file descriptor that stacks are written to.
    """

    stacks: ClassVar[int] = _STDERR

    def __init__(self, name: str, seconds: float = STALL) -> None:
        self.name, self._seconds = name, seconds
        self._until, self._armed = 0.0, -math.inf
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"watchdog of {name}", daemon=True)

    def progress(self) -> None:
        """Reset the deadline. Cheap enough to call for every token."""
        now = time.monotonic()
        self._until = now + self._seconds
        if now - self._armed >= 1:  # it starts a thread
            self._armed = now
            faulthandler.dump_traceback_later(self._seconds + GRACE, exit=True, file=self.stacks)

    def __enter__(self) -> Waiting:
        self.progress()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while (left := self._until - time.monotonic()) > 0:
            if self._over.wait(left):
                return
        if self._over.is_set():
            return
        words = f"{self.name}: nothing has happened for {self._seconds:g} s"
        for place in {_STDERR, self.stacks}:
            os.write(place, f"{'failed: ' if place == _STDERR else ''}{words}:\n".encode())
            faulthandler.dump_traceback(file=place, all_threads=True)
        os._exit(EXIT_CODE)
