"""The watchdog: every wait has a name and a deadline, and past it the process says where it hangs and ends.

A run that hangs looks like one that works. Here a stall ends it with the stacks of all threads in its log,
and in a file of their own where a place for it was named.
"""

from __future__ import annotations

import faulthandler
import math
import os
import threading
import time
from pathlib import Path
from typing import ClassVar

STALL = 1800.0  # seconds in which something must have happened
GRACE = 60.0  # seconds after which C code that holds the interpreter's lock is ended without a word of ours
EXIT_CODE = 1
STACKS = "stacks.txt"  # the file of stacks; the first line says what was waited for, if it could be said
_STDERR = 2


def leave_stacks_in(directory: Path) -> None:
    """From now on a stall leaves the stacks in `directory`/stacks.txt, which is empty until then."""
    Waiting.stacks = os.open(directory / STACKS, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)


def stall_in(directory: Path) -> str:
    """What a process that was told to `leave_stacks_in` this directory hung at; "" when it did not."""
    path = directory / STACKS
    first = path.read_text(errors="replace").partition("\n")[0] if path.exists() else ""
    if first.startswith("Timeout"):  # faulthandler's own words
        return "code that holds the interpreter's lock: nothing has happened"
    return first.rstrip(":")


class Waiting:
    """`with Waiting("sampling")`: ends the process when what is inside makes no progress for so long.

    It ends with code 1 at once, without any clean-up, for what hangs would hang that too; the processes it
    began die with it. Waits may be nested; the end of the inner one then disarms what is for code that holds
    the interpreter's lock.

    Args:
        name: of what is waited for, as the log shall tell it.
        seconds: between two calls of `progress`.

    Attributes:
        stacks: the descriptor that stacks are written to.
    """

    stacks: ClassVar[int] = _STDERR

    def __init__(self, name: str, seconds: float = STALL) -> None:
        self.name, self._seconds = name, seconds
        self._until, self._armed = 0.0, -math.inf
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"watchdog of {name}", daemon=True)

    def progress(self) -> None:
        """Something has happened: the deadline begins anew. Cheap enough for every token."""
        now = time.monotonic()
        self._until = now + self._seconds
        if now - self._armed >= 1:  # it takes a thread of its own
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
