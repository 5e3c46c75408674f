"""The watchdog ends a process that makes no progress, and writes the stacks of all threads.

A hanging run looks like a working one, so each wait has a name and a deadline. After the deadline the
process ends, with the stacks in its log and in stacks.txt if `write_stacks_to` was called.
"""

from __future__ import annotations

import faulthandler
import math
import os
import threading
import time
from pathlib import Path
from typing import ClassVar

STALL_SECONDS = 1800.0  # without progress
GRACE_SECONDS = 60.0  # further, until faulthandler ends C code that holds the GIL
EXIT_CODE = 1
STACKS_FILE = "stacks.txt"  # the file of stacks; its first line names the wait
_STDERR = 2


def write_stacks_to(directory: Path) -> None:
    """Write the stacks of a later stall to `directory`/stacks.txt too. Creates the file empty."""
    Watchdog.stacks = os.open(directory / STACKS_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)


def read_stall(directory: Path) -> str:
    """Return the wait at which a process stalled, from stacks.txt in `directory`; "" if it did not stall."""
    path = directory / STACKS_FILE
    first = path.read_text(errors="replace").partition("\n")[0] if path.exists() else ""
    if first.startswith("Timeout"):  # written by faulthandler
        return "code that holds the interpreter's lock: nothing has happened"
    return first.rstrip(":")


class Watchdog:
    """Ends the process if the block of a `with` statement makes no progress for `seconds`.

    The process ends at once with code 1 and without clean-up, which might hang too. Its child processes die
    with it. Waits may be nested; the end of an inner wait disarms faulthandler.

    Args:
        name: name of the wait in the log.
        seconds: longest time between two calls of `progress`.

    Attributes:
        stacks: file descriptor that stacks are written to.
    """

    stacks: ClassVar[int] = _STDERR

    def __init__(self, name: str, seconds: float = STALL_SECONDS) -> None:
        self.name, self._seconds = name, seconds
        self._deadline, self._armed = 0.0, -math.inf
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"watchdog of {name}", daemon=True)

    def progress(self) -> None:
        """Extend the deadline. Cheap enough to call for every token."""
        now = time.monotonic()
        self._deadline = now + self._seconds
        if now - self._armed >= 1:  # arming starts a thread, which is too costly for every token
            self._armed = now
            faulthandler.dump_traceback_later(self._seconds + GRACE_SECONDS, exit=True, file=self.stacks)

    def __enter__(self) -> Watchdog:
        self.progress()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._finished.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while (remaining := self._deadline - time.monotonic()) > 0:
            if self._finished.wait(remaining):
                return
        if self._finished.is_set():
            return
        message = f"{self.name}: nothing has happened for {self._seconds:g} s"
        for descriptor in {_STDERR, self.stacks}:
            os.write(descriptor, f"{'failed: ' if descriptor == _STDERR else ''}{message}:\n".encode())
            faulthandler.dump_traceback(file=descriptor, all_threads=True)
        os._exit(EXIT_CODE)
