"""The fake cloud's machines: each is a folder and a process tree on this machine, with a record in a file.

The records are the cloud's whole state, so a killed cloud continues after a restart. Times are seconds since
boot, which a restart of the cloud does not change.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from perilune.bundle.storage import remove_tree
from perilune.execution.launchers.process import start_detached
from perilune.execution.processes import Presence, ProcessIdentity, kill_all
from perilune.execution.providers.fake.box import SOCKET
from perilune.execution.providers.protocol import MachineStatus
from perilune.files import canonical_json

BOX = Path(__file__).with_name("box.py")
# The environment of a machine.
IMAGE = ("PATH", "PYTHONPATH", "LANG", "OMP_NUM_THREADS", "LD_LIBRARY_PATH", "XDG_CACHE_HOME")


@dataclass(frozen=True, slots=True)
class Record:
    """A machine in the cloud's own view.

    Attributes:
        born: when it starts to exist; later than the request for a creation with a late effect.
        visible: when it becomes visible in answers.
        ready: when it accepts commands.
        ends: when the cloud ends it because its lifetime is over; None for no limit.
        ended: when it ended; None while it lives.
        end_visible: when its end becomes visible in answers.
        taken: when its preemption happens; None if none is planned.
        cut_until: end of a period of unreachability.
        box: identity of its first process; None before it runs.
    """

    key: str
    id: str
    kind: str
    price: float
    born: float
    visible: float
    ready: float
    ends: float | None
    ended: float | None = None
    end_visible: float = 0.0
    reason: str = ""
    taken: float | None = None
    cut_until: float = 0.0
    box: Mapping[str, Any] | None = None

    def alive(self, now: float) -> bool:
        """Return whether it exists and is billed."""
        return self.born <= now and self.ended is None

    def shown(self, now: float) -> bool:
        """Return whether it is visible in answers."""
        return self.visible <= now

    def status(self, now: float) -> MachineStatus:
        if self.ended is not None:
            return MachineStatus.ENDED if now >= self.end_visible else MachineStatus.ENDING
        return MachineStatus.RUNNING if now >= self.ready and self.box else MachineStatus.PENDING

    def billed_seconds(self, now: float) -> float:
        """Return the time billed so far."""
        return max(0.0, (now if self.ended is None else self.ended) - self.born)


class Machine:
    """The folder, processes and record of a machine.

    Args:
        folder: contains record.json, home/ and the socket of the first process.
    """

    def __init__(self, folder: Path, record: Record) -> None:
        self.folder, self.record = folder, record

    @classmethod
    def load(cls, folder: Path) -> Machine:
        return cls(folder, Record(**json.loads((folder / "record.json").read_bytes())))

    def update(self, **changes: Any) -> None:
        """Change the record atomically."""
        self.record = replace(self.record, **changes)
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / ".record.json.tmp"
        temporary.write_bytes(canonical_json(asdict(self.record)))
        temporary.replace(self.folder / "record.json")

    def boot(self) -> None:
        """Start its first process."""
        home = self.folder / "home"
        (home / "tmp").mkdir(parents=True, exist_ok=True)
        image = {name: os.environ[name] for name in IMAGE if name in os.environ}
        variables = {"HOME": str(home), "TMPDIR": str(home / "tmp"), "USER": "fake"}
        command = [sys.executable, "-S", "-E", str(BOX), str(self.folder)]
        process = start_detached(command, self.folder / "console.log", {**image, **variables})
        identity = ProcessIdentity.of(process.pid)
        self.update(box=identity and asdict(identity))

    def running(self) -> bool:
        """Return whether its first process lives."""
        box = self.record.box
        return box is not None and ProcessIdentity(**box).presence() is Presence.PRESENT

    def power_off(self) -> None:
        """Kill every process of the machine, and wipe its disk."""
        box = self.record.box
        if box is not None and self.running():
            first = psutil.Process(int(box["pid"]))
            kill_all(lambda: first.children(recursive=True) if first.is_running() else [], grace=0.0)
            kill_all(lambda: [first] if self.running() else [], grace=0.0)  # its parent may never reap it
        with contextlib.suppress(OSError):
            remove_tree(self.folder / "home")

    def connect(self) -> socket.socket:
        """Return a connection to the first process, for one command.

        Raises:
            OSError: it does not answer.
        """
        directory = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(f"/proc/self/fd/{directory}/{SOCKET}")  # the path of a socket is limited
        except OSError:
            connection.close()
            raise
        finally:
            os.close(directory)
        return connection


def now() -> float:
    """Return the seconds since boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
