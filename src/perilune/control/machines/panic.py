"""Panic: terminate every rented machine of a home, and rent no more until the panic is lifted.

A file in the home stops renting; it is written before any machine is terminated. Every code path that rents
checks the file, so a running daemon rents nothing either.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sqlalchemy import select
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import Session

from perilune.control.machines.providers import CLUSTER, PROVIDERS, Providers
from perilune.control.record.database import DEFERRED, database_of
from perilune.control.record.home import Home
from perilune.control.record.identity import names, owns_machine
from perilune.control.record.store import Machine
from perilune.control.record.transitions import MachineState
from perilune.errors import PeriluneError
from perilune.execution.providers.protocol import MachineStatus, Provider, RentedMachine, tag_of
from perilune.files import write_atomic

FLAG = "panic"  # file in the home
REASON = "panic"  # why a machine is terminated
STOPPED = "`perilune panic` has stopped renting; `perilune panic --lift` allows it again"
PANIC_SECONDS = 2.0  # between two looks at a provider; two are needed to prove a machine gone


def renting_is_stopped(home: Home) -> bool:
    """Whether a panic is in effect."""
    return (home.root / FLAG).exists()


def allow_renting(home: Home) -> bool:
    """Lift a panic; False if there was none."""
    try:
        (home.root / FLAG).unlink()
    except FileNotFoundError:
        return False
    return True


@dataclass(slots=True)
class Panic:
    """The result of a panic.

    Attributes:
        ended: keys of machines that are proven gone.
        left: keys of machines that were still listed at the end.
        silent: providers and files that were unusable at the end, with the error.
        unreached: keys of recorded machines whose provider could not be asked, with the reason.
    """

    ended: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    silent: dict[str, str] = field(default_factory=dict)
    unreached: dict[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all machines are proven gone."""
        return not (self.left or self.silent or self.unreached)


def panic(home: Home, patience: float, tell: Callable[[str], None] = lambda line: None) -> Panic:
    """Stop renting, then terminate every machine with this home's tag or in its record.

    Works without the database: if that is unreadable, all machines with the tag are terminated.

    Args:
        patience: seconds to keep trying while a machine is left or a provider does not answer.
        tell: called with a line for every machine that is terminated and everything that is unusable.
    """
    report = Panic()
    try:
        write_atomic(home.root / FLAG, f"{time.time()}\n")
    except OSError as error:
        report.silent[FLAG] = f"renting is not stopped: {error}"
    named = (home.root / CLUSTER).exists()
    try:
        recorded = _recorded(home)
    except (PeriluneError, DatabaseError) as error:
        recorded = {}
        tell(f"the record cannot be read: {error}")
        if not named:
            report.silent[CLUSTER] = "the file is missing, so this home's tag is unknown"
    rounds = _Rounds(home, names(home, recorded), report, tell)
    deadline = time.monotonic() + patience
    while not rounds.over() and time.monotonic() < deadline:
        time.sleep(PANIC_SECONDS)
    rounds.conclude(recorded)
    return report


class _Rounds:
    """Looks at all providers repeatedly, and terminates every machine that is alive."""

    def __init__(self, home: Home, clusters: list[str], report: Panic, tell: Callable[[str], None]) -> None:
        self.providers, self.report, self.tell = Providers(home), report, tell
        self.tags = [tag_of(cluster) for cluster in clusters]
        self.names: list[str] = []
        self.seen: dict[str, str] = {}  # machine to provider
        self.alive: dict[str, list[str]] = {}
        self.clear: dict[str, float] = {}  # provider to the time when it first listed no live machine
        self.proven: set[str] = set()  # providers that did so twice, far enough apart

    def over(self) -> bool:
        """Look once at every provider that is not proven empty; True once all are."""
        try:
            self.names = self.providers.names()
            self.report.silent.pop(PROVIDERS, None)
        except PeriluneError as error:
            self._cannot_use(PROVIDERS, error)
            return False
        for name in self.names:
            if name not in self.proven:
                self._look(name)
        return self.proven >= set(self.names)

    def conclude(self, recorded: Mapping[str, str]) -> None:
        """Fill in the report, including recorded machines whose provider could not be asked."""
        report = self.report
        report.left = tuple(key for keys in self.alive.values() for key in keys)
        report.ended = tuple(key for key, name in self.seen.items() if name in self.proven)
        for key, name in recorded.items():
            if key in report.ended:
                continue
            if name not in self.names:
                report.unreached[key] = f"no provider is called '{name}' in {PROVIDERS}"
            elif name not in self.proven and key not in report.left:
                why = report.silent.get(name, "its provider has not yet confirmed twice that it is gone")
                report.unreached[key] = why

    def _look(self, name: str) -> None:
        try:
            provider = self.providers.get(name)
            listed = [one for tag in self.tags for one in provider.list(tag)]
            self.report.silent.pop(name, None)
        except Exception as error:
            self._cannot_use(name, error)
            return
        alive = [one for one in listed if one.status is not MachineStatus.ENDED]
        self.alive[name] = [one.key for one in alive]
        for machine in alive:
            self._end(name, provider, machine)
        if alive:
            self.clear.pop(name, None)
            return
        gap = max(PANIC_SECONDS, provider.capabilities.visibility_seconds)
        if time.monotonic() - self.clear.setdefault(name, time.monotonic()) >= gap:
            self.proven.add(name)

    def _end(self, name: str, provider: Provider, machine: RentedMachine) -> None:
        self.seen[machine.key] = name
        self.tell(f"{name}: terminating {machine.key}")
        try:
            provider.terminate(machine.key)
        except Exception as error:  # the next round asks again
            self._cannot_use(name, error)

    def _cannot_use(self, name: str, error: Exception) -> None:
        self.report.silent[name] = str(error)
        self.tell(f"{name}: {error}")


def _recorded(home: Home) -> dict[str, str]:
    """Recorded machines that are not known to be gone, with their providers. Writes nothing.

    Raises:
        PeriluneError, DatabaseError: the record cannot be read.
    """
    database = database_of(home)
    if database.where == str(home.database) and not home.database.exists():
        return {}
    try:
        with Session(database.engine.execution_options(**DEFERRED)) as session:
            alive = select(Machine.key, Machine.provider).where(Machine.state != MachineState.GONE.value)
            rows = session.execute(alive).all()
            return {row.key: row.provider for row in rows if owns_machine(home, row.key)}
    finally:
        database.engine.dispose()
