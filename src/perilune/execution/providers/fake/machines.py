"""The fake cloud's machines: each a folder and a process tree of this host, with a record that is a file.

The records are all the state there is, so that a cloud that was killed goes on where it was. Times are
seconds since boot, which a restart of the cloud does not change.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from perilune.bundle.storage import remove_tree
from perilune.execution.processes import Presence, ProcessIdentity, kill_all
from perilune.execution.providers.fake.box import SOCKET
from perilune.execution.providers.protocol import MachineStatus
from perilune.files import canonical_json

BOX = Path(__file__).with_name("box.py")
IMAGE = ("PATH", "PYTHONPATH", "LANG", "OMP_NUM_THREADS", "LD_LIBRARY_PATH")  # what a machine's image brings


@dataclass(frozen=True, slots=True)
class Record:
    """One machine as the cloud itself knows it.

    Attributes:
        born: when it comes to be; later than its creation when the creation takes effect late.
        visible: from when on answers show it.
        ready: when it answers commands.
        ends: when the cloud ends it by itself, as was asked; None never.
        ended: when it ended; None while it has not.
        end_visible: from when on answers show that.
        taken: when a preemption that was announced happens.
        cut_until: until when it cannot be reached.
        box: identity of its first process; None before that runs.
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
        """Whether it is there, and costs money."""
        return self.born <= now and self.ended is None

    def shown(self, now: float) -> bool:
        """Whether answers show it at all."""
        return self.visible <= now

    def status(self, now: float) -> MachineStatus:
        """What answers say of it."""
        if self.ended is not None:
            return MachineStatus.ENDED if now >= self.end_visible else MachineStatus.ENDING
        return MachineStatus.RUNNING if now >= self.ready and self.box else MachineStatus.PENDING

    def billed_seconds(self, now: float) -> float:
        """How long it has cost money."""
        return max(0.0, (now if self.ended is None else self.ended) - self.born)


class Machine:
    """One machine's folder, processes and record.

    Args:
        folder: of this machine; holds record.json, home/ and the box's socket.
    """

    def __init__(self, folder: Path, record: Record) -> None:
        self.folder, self.record = folder, record

    @classmethod
    def load(cls, folder: Path) -> Machine:
        """The machine whose folder this is."""
        return cls(folder, Record(**json.loads((folder / "record.json").read_bytes())))

    def update(self, **changes: Any) -> None:
        """Change the record, whole or not at all."""
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
        place = {"HOME": str(home), "TMPDIR": str(home / "tmp"), "USER": "fake"}
        with (self.folder / "console.log").open("ab") as console:
            process = subprocess.Popen(
                [sys.executable, "-S", "-E", str(BOX), str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
                env={**image, **place},
            )
        identity = ProcessIdentity.of(process.pid)
        self.update(box=identity and identity.asdict())

    def running(self) -> bool:
        """Whether its first process lives."""
        box = self.record.box
        return box is not None and ProcessIdentity.parse(dict(box)).presence() is Presence.PRESENT

    def power_off(self) -> None:
        """End every process on it, at once and without asking, and wipe its disk."""
        box = self.record.box
        if box is not None and self.running():
            first = psutil.Process(int(box["pid"]))
            kill_all(lambda: first.children(recursive=True) if first.is_running() else [], grace=0.0)
            kill_all(lambda: [first] if self.running() else [], grace=0.0)  # its parent may never ask for it
        with contextlib.suppress(OSError):
            remove_tree(self.folder / "home")

    def connect(self) -> socket.socket:
        """A connection to its first process, which takes one command.

        Raises:
            OSError: when it does not answer.
        """
        directory = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(f"/proc/self/fd/{directory}/{SOCKET}")  # a socket's path may not be long
        except OSError:
            connection.close()
            raise
        finally:
            os.close(directory)
        return connection


def now() -> float:
    """Seconds since boot, as the cloud counts."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
