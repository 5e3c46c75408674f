"""All machines of the fake cloud, and what happens to them as time goes by."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perilune.errors import PeriluneError, RequestError
from perilune.execution.providers.fake.machines import Machine, Record, now
from perilune.execution.providers.fake.weather import Fault, Storm
from perilune.execution.providers.protocol import MachineStatus

PRICES = {"small": 0.4, "large": 3.2, "spot": 0.1}  # a kind's price per hour
PREEMPTIBLE = frozenset({"spot"})
TICK = 0.1  # seconds


class FullError(PeriluneError):
    """There is no room for another machine of this kind."""


class Estate:
    """The machines under one folder.

    Args:
        capacity: machines of a kind that may live at once.
        cut: called with a machine's id when connections to it are to break.
    """

    def __init__(
        self, folder: Path, storm: Storm, capacity: Mapping[str, int], cut: Callable[[str], None]
    ) -> None:
        self.folder, self.storm, self.capacity, self._cut = folder, storm, capacity, cut
        self._lock = threading.RLock()
        folder.mkdir(parents=True, exist_ok=True)
        found = [Machine.load(path.parent) for path in folder.glob("*/record.json")]
        self._machines = {machine.record.id: machine for machine in found}
        self._ticked = now()

    def create(self, key: str, kind: str, lifetime: float | None, *, late: float = 0.0) -> Machine:
        """Make the machine called `key`, or find the one that is called so.

        Raises:
            RequestError: there is no such kind, or `key` names a machine of another kind.
            FullError: none of that kind is left.
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
                raise FullError(f"no machine of kind '{kind}' is to be had now")
            weather, born = self.storm.weather, now() + late
            identity = f"m-{secrets.token_hex(4)}"
            record = Record(
                key=key,
                id=identity,
                kind=kind,
                price=PRICES[kind],
                born=born,
                visible=born + self.storm.seconds(weather.visibility_seconds),
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
        """How many more machines of a kind can be had."""
        taken = sum(one.record.kind == kind and one.record.ended is None for one in self.all())
        return self.capacity[kind] - taken

    def all(self) -> list[Machine]:
        """Every machine that was ever asked for."""
        with self._lock:
            return list(self._machines.values())

    def shown(self, prefix: str) -> list[Machine]:
        """Machines as answers show them: not yet those just made, no more those long ended."""
        moment = now()
        forget = self.storm.weather.forget_seconds
        return [
            machine
            for machine in self.all()
            if machine.record.key.startswith(prefix)
            and machine.record.shown(moment)
            and (machine.record.ended is None or moment < machine.record.ended + forget)
        ]

    def end(self, machine: Machine, reason: str) -> None:
        """End a machine that is there, for good."""
        with self._lock:
            moment = now()
            if not machine.record.alive(moment):
                return
            shown = moment + self.storm.seconds(self.storm.weather.visibility_seconds)
            machine.update(ended=moment, end_visible=shown, reason=reason)
        self._cut(machine.record.id)
        machine.power_off()

    def preempt(self, machine: Machine, notice: float) -> None:
        """Take a machine away, after `notice` seconds."""
        self.storm.note(Fault.PREEMPTED, key=machine.record.key)
        machine.update(taken=now() + notice)

    def cut(self, machine: Machine, seconds: float) -> None:
        """Make a machine unreachable for a while."""
        self.storm.note(Fault.LINK_CUT, key=machine.record.key)
        machine.update(cut_until=now() + seconds)
        self._cut(machine.record.id)

    def host_death(self, machine: Machine) -> None:
        """The machine, and all on it, are gone."""
        self.storm.note(Fault.HOST_DEATH, key=machine.record.key)
        self.end(machine, "host failure")

    def tick(self) -> None:
        """Let happen what is due, and what chance says."""
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
            self.end(machine, "host failure")  # its first process is dead: so is it

    def _by_chance(self, machine: Machine, passed: float) -> None:
        weather, befalls = self.storm.weather, self.storm.befalls
        if machine.record.taken is None and befalls(weather.preemptions, passed):
            self.preempt(machine, weather.notice_seconds)
        elif befalls(weather.host_deaths, passed):
            self.host_death(machine)
        elif befalls(weather.link_cuts, passed):
            self.cut(machine, weather.cut_seconds)

    def document(self, machine: Machine) -> dict[str, Any]:
        """A machine as answers tell of it."""
        record, moment = machine.record, now()
        announced = (
            record.taken is not None and record.ended is None and self.storm.weather.notice_seconds > 0
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
