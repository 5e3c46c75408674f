"""Attempts on rented machines: one machine an attempt, there before it is staged, given back after it.

`RentedPlacement` is a place like any other once its machine is there; `Rentals` sees to it that it is, and
says what it means for an attempt when it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import select

from perilune.control.budget import over_the_cap, price_of
from perilune.control.clock import Instant
from perilune.control.faults import reached
from perilune.control.leases import Rental
from perilune.control.ledger import current
from perilune.control.machines import Fleet
from perilune.control.store import Attempt, Machine, Run, move_attempt, record
from perilune.control.sweep import SWEEP_SECONDS, sweep, tend_all
from perilune.control.transitions import AttemptState, MachineState, RunState
from perilune.errors import PeriluneError, RequestError
from perilune.execution.hosts.protocol import Host, HostRefusedError, HostUnreachableError
from perilune.execution.observation import Observation
from perilune.execution.placements.protocol import Assignment, Capabilities, Placement
from perilune.execution.providers.protocol import MachineKey
from perilune.execution.verdict import Cause

ENDINGS = {  # what a provider says of a machine that has gone, and what that is to its attempt
    "preempted": (AttemptState.PREEMPTED, Cause.PREEMPTED),
    "lifetime": (AttemptState.LOST, Cause.LEASE_ENDED),
}


class RentedPlacement:
    """Runs each attempt on a machine rented for it.

    Args:
        build: the placement on a machine, from the way there.
    """

    launcher = "process"
    capabilities = Capabilities(elsewhere=True, look_every=1.0)

    def __init__(self, fleet: Fleet, rental: Rental, build: Callable[[Host], Placement]) -> None:
        self.fleet, self.rental, self._build = fleet, rental, build
        self.name = f"{rental.provider}:{rental.kind}"

    def stage(
        self, attempt: Assignment, bundle: Path, order: Mapping[str, Any], previous: Path | None
    ) -> None:
        """As `Placement.stage`."""
        self._there(attempt).stage(attempt, bundle, order, previous)

    def start(self, attempt: Assignment) -> None:
        """As `Placement.start`."""
        self._there(attempt).start(attempt)

    def starting(self, attempt: Assignment) -> bool:
        """Never: a worker there has claimed its attempt when `start` is done."""
        return False

    def observe(self, attempt: Assignment) -> Observation:
        """As `Placement.observe`."""
        try:
            return self._there(attempt).observe(attempt)
        except HostUnreachableError as error:
            return Observation(unseen=str(error))

    def pull(self, attempt: Assignment, *, whole: bool = False) -> None:
        """As `Placement.pull`; from a machine that is gone, or not there yet, nothing will come."""
        if not self._empty(attempt):
            self._there(attempt).pull(attempt, whole=whole)

    def stop(self, attempt: Assignment) -> bool:
        """As `Placement.stop`; on a machine that is gone, or not there yet, nothing runs."""
        return self._empty(attempt) or self._there(attempt).stop(attempt)

    def remove(self, attempt: Assignment) -> None:
        """Nothing: the machine itself goes."""

    def key(self, attempt: Assignment) -> str:
        """Key of the attempt's machine."""
        return self.fleet.key(attempt.run_id, attempt.epoch)

    def _empty(self, attempt: Assignment) -> bool:
        """Whether nothing of the attempt can be on a machine."""
        machine = self.fleet.machine(self.key(attempt))
        return machine is None or machine.state in {MachineState.REQUESTED, MachineState.GONE}

    def _there(self, attempt: Assignment) -> Placement:
        """The placement on the attempt's machine.

        Raises:
            HostUnreachableError: there is none to be reached now.
        """
        key = self.key(attempt)
        found = self.fleet.last_seen(self.rental.provider, key)
        if found is None:
            raise HostUnreachableError(f"its machine {key} has not been seen")
        return self._build(self.fleet.providers.get(self.rental.provider).host(found))


class Rentals:
    """Sees to the machines of attempts.

    Args:
        end: ends an attempt, as `Reconciler._end`.
    """

    def __init__(self, fleet: Fleet, end: Callable[[Attempt, AttemptState, Cause, str], bool]) -> None:
        self.fleet, self._end = fleet, end
        self._swept: Instant | None = None
        self._provided: set[str] = set()  # runs

    def provide(self, placement: Placement, run: Run, attempt: Attempt, there: Assignment, act: bool) -> bool:
        """See to the machine of a live attempt; whether the attempt can go on, now that this was done."""
        if not isinstance(placement, RentedPlacement):
            return True
        self._provided.add(run.id)
        machine = self.fleet.tend(placement.key(there))
        if machine is None or machine.state == MachineState.REQUESTED:
            if run.desired == RunState.CANCELLED:
                self._end(attempt, AttemptState.CANCELLED, Cause.STOPPED, "cancelled")
            elif machine is None and act and self._rent(placement.rental, attempt):
                self.fleet.tend(placement.key(there))
            return False
        if machine.state in {MachineState.TERMINATING, MachineState.GONE}:
            self._without(attempt, machine)
            return False
        self._hand_over(attempt)
        return machine.state == MachineState.READY or self._leave(placement, attempt, there)

    def tend_all(self) -> None:
        """Take every machine one step on; now and then, look for those that nothing knows of."""
        tend_all(self.fleet)
        now = Instant.now()
        if self._swept is None or now.since(self._swept) >= SWEEP_SECONDS:
            self._swept = now
            sweep(self.fleet)

    def follow(self, run_id: str) -> None:
        """Take the machines of a run's ended attempts one step on, if any was seen to here."""
        if run_id not in self._provided:
            return
        query = select(Machine).where(Machine.run_id == run_id, Machine.state != MachineState.GONE.value)
        with self.fleet.store.snapshot() as session:
            machines = list(session.scalars(query))
            live = {
                machine.key
                for machine in machines
                if (attempt := session.get(Attempt, (run_id, machine.epoch))) is not None
                and not AttemptState(attempt.state).terminal
            }
        for machine in machines:
            if machine.key not in live:
                self.fleet.tend(machine.key)

    def newest_epoch(self, placement: Placement, run: Run) -> int | None:
        """The newest attempt of a run that has a machine, which a restored database may have forgotten.

        Returns:
            Its number, 0 for none; None while its provider does not say.
        """
        providers = self.fleet.providers
        if not isinstance(placement, RentedPlacement) or placement.rental.provider not in providers.names():
            return 0
        listing = self.fleet.listing(placement.rental.provider)
        if listing.machines is None:
            return None
        keys = [MachineKey.parse(key) for key in listing.machines]
        return max((key.epoch for key in keys if key is not None and key.run_id == run.id), default=0)

    def _rent(self, rental: Rental, attempt: Attempt) -> bool:
        """PLANNED to PROVISIONING, with the intent to rent, when the day's budget has room for the lease.

        Returns:
            Whether it is recorded now.
        """
        try:
            price = price_of(self.fleet.providers, rental)
        except RequestError as error:  # there is no such provider, or no such kind
            with self.fleet.store.transaction() as session:
                move_attempt(session, current(session, attempt), AttemptState.PROVISIONING)
            self._end(attempt, AttemptState.FAILED, Cause.HOST_REFUSED, str(error))
            return False
        except PeriluneError:
            return False  # it does not say now
        with self.fleet.store.transaction() as session:
            row = current(session, attempt)
            why = over_the_cap(session, self.fleet.providers.daily_cap(), rental, price)
            if why:
                if row.message != why:
                    row.message = why
                    record(session, "machine.not_afforded", run_id=row.run_id, epoch=row.number, why=why)
                return False
            row.message = ""
            self.fleet.rent(session, row, rental, price)
            move_attempt(session, row, AttemptState.PROVISIONING)
        reached("rent.committed")
        return True

    def _hand_over(self, attempt: Attempt) -> None:
        """PROVISIONING to STAGING: the machine is there."""
        if attempt.state == AttemptState.PROVISIONING:
            with self.fleet.store.transaction() as session:
                row = current(session, attempt)
                if row.state == AttemptState.PROVISIONING:
                    move_attempt(session, row, AttemptState.STAGING)
            attempt.state = AttemptState.STAGING.value

    def _leave(self, placement: RentedPlacement, attempt: Attempt, there: Assignment) -> bool:
        """The machine will be taken away: its worker is asked to leave. Whether it has left a verdict."""
        try:
            placement.stop(there)
            seen = placement.observe(there)
            if seen.verdict is None and not seen.unseen:
                placement.pull(there, whole=True)
                self._end(attempt, AttemptState.PREEMPTED, Cause.PREEMPTED, "its machine is taken away")
            return seen.verdict is not None
        except (HostUnreachableError, HostRefusedError):
            return False  # the next look tells whether it is gone

    def _without(self, attempt: Attempt, machine: Machine) -> None:
        """The attempt has lost its machine, or never had it."""
        never = attempt.state in {AttemptState.PLANNED, AttemptState.PROVISIONING}
        if machine.state == MachineState.TERMINATING and never:
            state, cause = AttemptState.FAILED, Cause.HOST_REFUSED if machine.refused else Cause.NO_MACHINE
        elif machine.state == MachineState.TERMINATING:  # our own doing
            state, cause = AttemptState.LOST, Cause.LEASE_ENDED
        else:
            state, cause = ENDINGS.get(machine.reason, (AttemptState.LOST, Cause.MACHINE_LOST))
        self._end(attempt, state, cause, f"its machine is no more: {machine.refused or machine.reason}")
