"""All machines of the fake cloud, and what happens to them over time."""

import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perilune.errors import PeriluneError, RequestError
from perilune.execution.providers.fake.machines import Machine, Record, now
from perilune.execution.providers.fake.weather import Fault, FaultInjector
from perilune.execution.providers.protocol import MachineStatus

PRICES = {"small": 0.4, "large": 3.2, "spot": 0.1}  # currency units per hour, by kind
PREEMPTIBLE = frozenset({"spot"})
TICK = 0.1  # seconds


class FullError(PeriluneError):
    """No machine of this kind is available."""


class Inventory:
    """The machines in one folder.

    Args:
        capacity: live machines per kind.
        cut: called with a machine's id to break the connections to it.
    """

    def __init__(
        self, folder: Path, faults: FaultInjector, capacity: Mapping[str, int], cut: Callable[[str], None]
    ) -> None:
        self.folder, self.faults, self.capacity, self._cut = folder, faults, capacity, cut
        self._lock = threading.RLock()
        folder.mkdir(parents=True, exist_ok=True)
        machines = [Machine.load(path.parent) for path in folder.glob("*/record.json")]
        self._machines = {machine.record.id: machine for machine in machines}
        self._ticked = now()

    def create(self, key: str, kind: str, lifetime: float | None, *, late: float = 0.0) -> Machine:
        """Create the machine with this key, or find the existing one.

        Raises:
            RequestError: there is no such kind, or the key belongs to a machine of another kind.
            FullError: no machine of that kind is available.
        """
        with self._lock:
            for machine in self._machines.values():
                if machine.record.key == key:
                    if machine.record.kind != kind:
                        raise RequestError(f"{key} is a machine of kind {machine.record.kind}")
                    return machine
            if kind not in PRICES:
                raise RequestError(f"there is no kind '{kind}'", remedy=f"one of {', '.join(PRICES)}")
            if self.room(kind) < 1:
                raise FullError(f"no machine of kind '{kind}' is available")
            weather, born = self.faults.weather, now() + late
            identity = f"m-{secrets.token_hex(4)}"
            record = Record(
                key=key,
                id=identity,
                kind=kind,
                price=PRICES[kind],
                born=born,
                visible=born + self.faults.seconds(weather.visibility_seconds),
                ready=born + weather.boot_seconds,
                ends=None if lifetime is None else born + lifetime,
            )
            machine = Machine(self.folder / identity, record)
            machine.update()
            self._machines[identity] = machine
            if late == 0.0 and weather.boot_seconds == 0.0:
                machine.boot()
            return machine

    def room(self, kind: str) -> int:
        """Return the number of further machines of a kind that are available."""
        taken = sum(machine.record.kind == kind and machine.record.ended is None for machine in self.all())
        return self.capacity[kind] - taken

    def all(self) -> list[Machine]:
        """Return every machine that was ever created."""
        with self._lock:
            return list(self._machines.values())

    def shown(self, prefix: str) -> list[Machine]:
        """Return the machines visible in answers: neither those just created nor those ended long ago."""
        moment = now()
        forget = self.faults.weather.forget_seconds
        return [
            machine
            for machine in self.all()
            if machine.record.key.startswith(prefix)
            and machine.record.shown(moment)
            and (machine.record.ended is None or moment < machine.record.ended + forget)
        ]

    def end(self, machine: Machine, reason: str) -> None:
        """End a live machine for good."""
        with self._lock:
            moment = now()
            if not machine.record.alive(moment):
                return
            visible = moment + self.faults.seconds(self.faults.weather.visibility_seconds)
            machine.update(ended=moment, end_visible=visible, reason=reason)
        self._cut(machine.record.id)
        machine.power_off()

    def preempt(self, machine: Machine, notice: float) -> None:
        """Preempt a machine after `notice` seconds."""
        self.faults.note(Fault.PREEMPTED, key=machine.record.key)
        machine.update(taken=now() + notice)

    def cut(self, machine: Machine, seconds: float) -> None:
        """Make a machine unreachable for some seconds."""
        self.faults.note(Fault.LINK_CUT, key=machine.record.key)
        machine.update(cut_until=now() + seconds)
        self._cut(machine.record.id)

    def host_death(self, machine: Machine) -> None:
        """End a machine because its host fails."""
        self.faults.note(Fault.HOST_DEATH, key=machine.record.key)
        self.end(machine, "host failure")

    def tick(self) -> None:
        """Apply scheduled and random events."""
        moment = now()
        passed, self._ticked = moment - self._ticked, moment
        for machine in self.all():
            if machine.record.alive(moment):
                self._due(machine, moment)
                if machine.record.status(moment) is MachineStatus.RUNNING:
                    self._by_chance(machine, passed)

    def _due(self, machine: Machine, moment: float) -> None:
        record = machine.record
        if record.ends is not None and moment >= record.ends:
            self.end(machine, "lifetime")
        elif record.taken is not None and moment >= record.taken:
            self.end(machine, "preempted")
        elif record.box is None and moment >= record.ready:
            machine.boot()
        elif record.box is not None and not machine.running():
            self.end(machine, "host failure")  # its first process has died

    def _by_chance(self, machine: Machine, passed: float) -> None:
        weather, occurs = self.faults.weather, self.faults.occurs
        if machine.record.taken is None and occurs(weather.preemptions, passed):
            self.preempt(machine, weather.notice_seconds)
        elif occurs(weather.host_deaths, passed):
            self.host_death(machine)
        elif occurs(weather.link_cuts, passed):
            self.cut(machine, weather.cut_seconds)

    def document(self, machine: Machine) -> dict[str, Any]:
        record, moment = machine.record, now()
        announced = (
            record.taken is not None and record.ended is None and self.faults.weather.notice_seconds > 0
        )
        return {
            "key": record.key,
            "id": record.id,
            "kind": record.kind,
            "price": record.price,
            "status": record.status(moment).value,
            "billed_seconds": record.billed_seconds(moment),
            "notice_seconds": max(0.0, (record.taken or 0.0) - moment) if announced else None,
            "reason": record.reason,
        }
