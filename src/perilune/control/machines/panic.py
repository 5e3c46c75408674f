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

from perilune.control.machines.providers import CLUSTER_FILE, PROVIDERS_FILE, Providers
from perilune.control.record.database import SNAPSHOT_OPTIONS, open_database
from perilune.control.record.home import Home
from perilune.control.record.identity import cluster_names, owns_machine
from perilune.control.record.store import Machine
from perilune.control.record.transitions import MachineState
from perilune.errors import PeriluneError
from perilune.execution.providers.protocol import MachineStatus, Provider, RentedMachine, cluster_tag
from perilune.files import write_atomic

FLAG_FILE = "panic"  # file in the home
PANIC_REASON = "panic"  # why a machine is terminated
RENTING_STOPPED = "`perilune panic` has stopped renting; `perilune panic --lift` allows it again"
LOOK_INTERVAL_S = 2.0  # between two looks at a provider; two are needed to prove a machine gone


def renting_is_stopped(home: Home) -> bool:
    """Return whether a panic is in effect."""
    return (home.root / FLAG_FILE).exists()


def allow_renting(home: Home) -> bool:
    """Lift a panic; False if there was none."""
    try:
        (home.root / FLAG_FILE).unlink()
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
        """True if all machines are proven gone."""
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
        write_atomic(home.root / FLAG_FILE, f"{time.time()}\n")
    except OSError as error:
        report.silent[FLAG_FILE] = f"renting is not stopped: {error}"
    named = (home.root / CLUSTER_FILE).exists()
    try:
        recorded = _recorded_machines(home)
    except (PeriluneError, DatabaseError) as error:
        recorded = {}
        tell(f"the database cannot be read: {error}")
        if not named:
            report.silent[CLUSTER_FILE] = "the file is missing, so this home's tag is unknown"
    terminator = _Terminator(home, cluster_names(home, recorded), report, tell)
    deadline = time.monotonic() + patience
    while not terminator.run_round() and time.monotonic() < deadline:
        time.sleep(LOOK_INTERVAL_S)
    terminator.fill_report(recorded)
    return report


class _Terminator:
    def __init__(self, home: Home, clusters: list[str], report: Panic, tell: Callable[[str], None]) -> None:
        self.providers, self.report, self.tell = Providers(home), report, tell
        self.tags = [cluster_tag(cluster) for cluster in clusters]
        self.names: list[str] = []
        self.seen: dict[str, str] = {}  # machine to provider
        self.alive: dict[str, list[str]] = {}
        self.empty_since: dict[str, float] = {}  # provider to the time when it first listed no live machine
        self.proven_empty: set[str] = set()  # providers that did so twice, far enough apart

    def run_round(self) -> bool:
        """Look once at every provider that is not proven empty; True once all are."""
        try:
            self.names = self.providers.names()
            self.report.silent.pop(PROVIDERS_FILE, None)
        except PeriluneError as error:
            self._report_error(PROVIDERS_FILE, error)
            return False
        for name in self.names:
            if name not in self.proven_empty:
                self._look(name)
        return self.proven_empty >= set(self.names)

    def fill_report(self, recorded: Mapping[str, str]) -> None:
        """Fill in the report, including recorded machines whose provider could not be asked."""
        report = self.report
        report.left = tuple(key for keys in self.alive.values() for key in keys)
        report.ended = tuple(key for key, name in self.seen.items() if name in self.proven_empty)
        for key, name in recorded.items():
            if key in report.ended:
                continue
            if name not in self.names:
                report.unreached[key] = f"no provider is called '{name}' in {PROVIDERS_FILE}"
            elif name not in self.proven_empty and key not in report.left:
                why = report.silent.get(name, "its provider has not yet confirmed twice that it is gone")
                report.unreached[key] = why

    def _look(self, name: str) -> None:
        try:
            provider = self.providers.get(name)
            listed = [machine for tag in self.tags for machine in provider.list(tag)]
            self.report.silent.pop(name, None)
        except Exception as error:
            self._report_error(name, error)
            return
        alive = [machine for machine in listed if machine.status is not MachineStatus.ENDED]
        self.alive[name] = [machine.key for machine in alive]
        for machine in alive:
            self._terminate(name, provider, machine)
        if alive:
            self.empty_since.pop(name, None)
            return
        gap = max(LOOK_INTERVAL_S, provider.capabilities.visibility_seconds)
        if time.monotonic() - self.empty_since.setdefault(name, time.monotonic()) >= gap:
            self.proven_empty.add(name)

    def _terminate(self, name: str, provider: Provider, machine: RentedMachine) -> None:
        self.seen[machine.key] = name
        self.tell(f"{name}: terminating {machine.key}")
        try:
            provider.terminate(machine.key)
        except Exception as error:  # the next round asks again
            self._report_error(name, error)

    def _report_error(self, name: str, error: Exception) -> None:
        self.report.silent[name] = str(error)
        self.tell(f"{name}: {error}")


def _recorded_machines(home: Home) -> dict[str, str]:
    """Return the recorded machines that are not known to be gone, with their providers. Writes nothing.

    Raises:
        PeriluneError, DatabaseError: the database cannot be read.
    """
    database = open_database(home)
    if database.where == str(home.database) and not home.database.exists():
        return {}
    try:
        with Session(database.engine.execution_options(**SNAPSHOT_OPTIONS)) as session:
            alive = select(Machine.key, Machine.provider).where(Machine.state != MachineState.GONE.value)
            rows = session.execute(alive).all()
            return {row.key: row.provider for row in rows if owns_machine(home, row.key)}
    finally:
        database.engine.dispose()
