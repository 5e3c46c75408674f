"""Attempts on rented machines, which are terminated after the last stage of the experiment.

`RentedPlacement` is a placement like any other once its machines are ready. `Rentals` rents them, and decides
what the loss of a machine means for an attempt.
"""

from collections.abc import Callable, Mapping, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from perilune.bundle.job import Job
from perilune.control.machines.budget import find_cap_problem, lease_seconds_left, query_price
from perilune.control.machines.handover import is_taken_over, take_over_machines, waits_for_next_stage
from perilune.control.machines.leases import Rental
from perilune.control.machines.lifecycle import Fleet
from perilune.control.machines.panic import PANIC_REASON as PANIC
from perilune.control.machines.panic import RENTING_STOPPED, renting_is_stopped
from perilune.control.machines.sweep import SWEEP_INTERVAL_S, terminate_unrecorded
from perilune.control.record.clock import Instant
from perilune.control.record.faults import kill_point
from perilune.control.record.ledger import ensure_provisioning, ensure_staging, require_current
from perilune.control.record.store import Attempt, Machine, Run, record_event
from perilune.control.record.transitions import AttemptState, MachineState, RunState
from perilune.errors import PeriluneError, RequestError
from perilune.execution.hosts.protocol import Host, HostRefusedError, HostUnreachableError
from perilune.execution.observation import Observation
from perilune.execution.placements.gang import GangPlacement
from perilune.execution.placements.protocol import Assignment, Capabilities, Placement, StagingRequest
from perilune.execution.providers.protocol import MachineKey
from perilune.execution.ranks import Node
from perilune.execution.verdict import Cause
from perilune.files import read_json, sha256_bytes

RENDEZVOUS_PORTS = range(20000, 32000)  # of the leading machine's rendezvous; below Linux's ephemeral ports
SELF_STOP_MARGIN_S = 60.0  # seconds after its machine's lease at which an attempt stops by itself
OUTCOMES = {  # reason why a machine is gone, to the attempt's state and cause
    "preempted": (AttemptState.PREEMPTED, Cause.PREEMPTED),
    "lifetime": (AttemptState.LOST, Cause.LEASE_ENDED),
    PANIC: (AttemptState.PREEMPTED, Cause.PREEMPTED),
}


class RentedPlacement:
    """Runs each attempt on rented machines, one per node of its job.

    Args:
        build: makes the placement on a machine from its host, further variables for the worker, whether its
            files outlive it, and the seconds after which a worker that starts now stops its attempt.
        launcher: how a worker is started there.
    """

    capabilities = Capabilities(is_remote=True, look_interval_s=1.0)

    def __init__(
        self,
        fleet: Fleet,
        rental: Rental,
        build: Callable[[Host, Mapping[str, str], bool, float], Placement],
        launcher: str,
    ) -> None:
        self.fleet, self.rental, self._build, self.launcher = fleet, rental, build, launcher
        self.name = f"{rental.provider}:{rental.kind}"

    def stage(self, attempt: Assignment, request: StagingRequest) -> str:
        return self._ready_placement(attempt).stage(attempt, request)

    def start(self, attempt: Assignment) -> None:
        self._ready_placement(attempt).start(attempt)

    def is_starting(self, attempt: Assignment) -> bool:
        """Return False, because `start` returns only after the worker's claim."""
        return False

    def observe(self, attempt: Assignment) -> Observation:
        try:
            return self._ready_placement(attempt).observe(attempt)
        except HostUnreachableError as error:
            return Observation(unseen=str(error))

    def pull(self, attempt: Assignment, *, whole: bool = False) -> None:
        """Implement `Placement.pull`; skips machines that are gone or not ready."""
        self._combine(self._members(attempt)).pull(attempt, whole=whole)

    def stop(self, attempt: Assignment) -> bool:
        """Implement `Placement.stop`; nothing runs on a machine that is gone or not ready."""
        return self._combine(self._members(attempt)).stop(attempt)

    def remove(self, attempt: Assignment) -> None:
        """Implement `Placement.remove` if the files or the machine stay; otherwise the machine is removed."""
        members = self._members(attempt)
        if any(members) and (self._keeps_files() or self._are_awaited(attempt)):
            self._combine(members).remove(attempt)

    def _are_awaited(self, attempt: Assignment) -> bool:
        """Return whether the next stage of an experiment will take over the attempt's machines."""
        rows = self.fleet.machines_of(attempt.run_id, attempt.epoch)
        with self.fleet.store.snapshot() as session:
            return all(waits_for_next_stage(self.fleet.home, session, row) for row in rows)

    def _keeps_files(self) -> bool:
        return self.fleet.providers.get(self.rental.provider).capabilities.keeps_files

    def _ready_placement(self, attempt: Assignment) -> Placement:
        members = self._members(attempt)
        if not members or None in members:
            raise HostUnreachableError(f"a machine of attempt {attempt.epoch} is not ready")
        return self._combine(members)

    def _combine(self, members: list[Placement | None]) -> Placement:
        """Return one placement for all of the attempt's machines."""
        alone = members[0] if len(members) == 1 else None
        return alone or GangPlacement(self.name, self.launcher, members)

    def _members(self, attempt: Assignment) -> list[Placement | None]:
        """Return the placement on each of the attempt's machines; None if it is gone or not ready."""
        rows = self.fleet.machines_of(attempt.run_id, attempt.epoch)
        provider = self.fleet.providers.get(self.rental.provider) if rows else None
        lasting = len(rows) == 1 and self._keeps_files()
        members: list[Placement | None] = []
        for row in rows:
            if row.state in {MachineState.REQUESTED, MachineState.GONE}:
                members.append(None)
                continue
            machine = self.fleet.listings.last_seen(self.rental.provider, row.key)
            if machine is None or provider is None:
                raise HostUnreachableError(f"its machine {row.key} has not been listed yet")
            node = self._node(attempt, rows, row.rank)
            variables = node.variables() if len(rows) > 1 else {}
            left = max(0.0, lease_seconds_left(row)) + SELF_STOP_MARGIN_S
            members.append(self._build(provider.host(machine), variables, lasting, left))
        return members

    def _node(self, attempt: Assignment, rows: Sequence[Machine], rank: int) -> Node:
        """Return the place of a machine among the attempt's machines. Each attempt has its own port."""
        leader = self.fleet.listings.last_seen(self.rental.provider, rows[0].key)
        name = f"{attempt.run_id}/{attempt.epoch}".encode()
        port = RENDEZVOUS_PORTS.start + int(sha256_bytes(name), 16) % len(RENDEZVOUS_PORTS)
        return Node(rank, len(rows), leader.address if leader else "", port)


class Rentals:
    """Rents the machines of attempts, and reacts to their loss."""

    def __init__(self, fleet: Fleet, end: Callable[[Attempt, AttemptState, Cause, str], bool]) -> None:
        self.fleet, self._end = fleet, end
        self._swept: Instant | None = None
        self._managed_runs: set[str] = set()  # runs whose machines this process reconciles

    def provide_machines(
        self, placement: Placement, run: Run, attempt: Attempt, assigned: Assignment, act: bool
    ) -> bool:
        """Rent and check the machines of a live attempt; True if the attempt can proceed.

        Args:
            act: whether machines may be rented now.
        """
        if not isinstance(placement, RentedPlacement):
            return True
        self._managed_runs.add(run.id)
        machines = self._reconcile(attempt)
        gone = [row for row in machines if row.state in {MachineState.TERMINATING, MachineState.GONE}]
        if gone:
            self._end_without_machine(attempt, gone[0])
            return False
        if not machines or any(machine.state == MachineState.REQUESTED for machine in machines):
            if run.desired == RunState.CANCELLED:
                self._end(attempt, AttemptState.CANCELLED, Cause.STOPPED, "cancelled")
            elif not machines and act and self._rent(placement.rental, attempt):
                self._reconcile(attempt)
            return False
        self._begin_staging(attempt)
        staying = all(machine.state == MachineState.READY for machine in machines)
        return staying or self._evacuate(placement, attempt, assigned)

    def _reconcile(self, attempt: Attempt) -> list[Machine]:
        rows = self.fleet.machines_of(attempt.run_id, attempt.number)
        return [machine for row in rows if (machine := self.fleet.reconcile(row.key)) is not None]

    def reconcile_all(self) -> None:
        """Reconcile every machine; from time to time, also look for unrecorded ones."""
        self.fleet.reconcile_all()
        now = Instant.now()
        if self._swept is None or now.since(self._swept) >= SWEEP_INTERVAL_S:
            self._swept = now
            terminate_unrecorded(self.fleet)

    def reconcile_managed(self, *, live: bool = False) -> list[Machine]:
        """Reconcile the machines of ended attempts that this process managed; with `live`, of all attempts.

        Returns:
            Those that were not proven gone before.
        """
        runs = tuple(self._managed_runs)  # other threads may add to it meanwhile
        if not runs:
            return []
        query = select(Machine).where(Machine.run_id.in_(runs), Machine.state != MachineState.GONE.value)
        with self.fleet.store.snapshot() as session:
            machines = [row for row in session.scalars(query) if live or not _is_held(session, row)]
        for machine in machines:
            self.fleet.reconcile(machine.key)
        return machines

    def newest_epoch(self, placement: Placement, run: Run) -> int | None:
        """Return the newest attempt of a run that has a machine, which a restored database may not know.

        Returns:
            Its number, or 0 if there is none; None if the provider does not answer.
        """
        providers = self.fleet.providers
        if not isinstance(placement, RentedPlacement) or placement.rental.provider not in providers.names():
            return 0
        listing = self.fleet.listings.get(placement.rental.provider)
        if listing.machines is None:
            return None
        keys = [MachineKey.parse(key) for key in listing.machines]
        return max((key.epoch for key in keys if key is not None and key.run_id == run.id), default=0)

    def _rent(self, rental: Rental, attempt: Attempt) -> bool:
        """Give an attempt its machines, all or none, and move it from PLANNED to PROVISIONING.

        It takes over the machines of the stage before. If there are none that fit, the intent to rent new
        ones is recorded, provided that the daily cap allows it.

        Returns:
            True if it has machines now.
        """
        try:
            price = query_price(self.fleet.providers, rental)
        except RequestError as error:  # no such provider or kind
            with self.fleet.store.transaction() as session:
                ensure_provisioning(session, attempt)
            self._end(attempt, AttemptState.FAILED, Cause.HOST_REFUSED, str(error))
            return False
        except PeriluneError:
            return False  # the provider does not answer now
        job = Job.model_validate(read_json(self.fleet.home.bundle(attempt.run_id) / "job.json"))
        nodes = job.resources.nodes
        with self.fleet.store.transaction() as session:
            row = require_current(session, attempt)
            why = RENTING_STOPPED if renting_is_stopped(self.fleet.home) else ""
            cap = self.fleet.providers.daily_cap()
            if not why and take_over_machines(session, row, rental, nodes):
                point = "handover.committed"
            elif why := why or find_cap_problem(session, cap, rental, price, nodes):
                if row.message != why:
                    row.message = why
                    record_event(session, "machine.not_rented", run_id=row.run_id, epoch=row.number, why=why)
                return False
            else:
                self.fleet.rent(session, row, rental, price, nodes)
                point = "rent.committed"
            row.message = ""
            ensure_provisioning(session, attempt)
        kill_point(point)
        return True

    def _begin_staging(self, attempt: Attempt) -> None:
        if attempt.state == AttemptState.PROVISIONING:
            with self.fleet.store.transaction() as session:
                ensure_staging(session, attempt)
            attempt.state = AttemptState.STAGING.value

    def _evacuate(self, placement: RentedPlacement, attempt: Attempt, assigned: Assignment) -> bool:
        """Stop the worker on machines that will be preempted; True if it has left a verdict."""
        try:
            placement.stop(assigned)
            observation = placement.observe(assigned)
            if observation.verdict is None and not observation.unseen:
                placement.pull(assigned, whole=True)
                self._end(attempt, AttemptState.PREEMPTED, Cause.PREEMPTED, "its machine is preempted")
            return observation.verdict is not None
        except (HostUnreachableError, HostRefusedError):
            return False  # the next look shows whether the machine is gone

    def _end_without_machine(self, attempt: Attempt, machine: Machine) -> None:
        never_staged = attempt.state in {AttemptState.PLANNED, AttemptState.PROVISIONING}
        if never_staged and machine.reason not in OUTCOMES:
            state, cause = AttemptState.FAILED, Cause.HOST_REFUSED if machine.refused else Cause.NO_MACHINE
        elif machine.state == MachineState.TERMINATING and machine.reason not in OUTCOMES:  # we ended it
            state, cause = AttemptState.LOST, Cause.LEASE_ENDED
        else:
            state, cause = OUTCOMES.get(machine.reason, (AttemptState.LOST, Cause.MACHINE_LOST))
        if cause is Cause.LEASE_ENDED and is_taken_over(machine):
            cause = Cause.MACHINE_LOST  # of the machine's whole lease, this attempt had only the rest
        self._end(attempt, state, cause, f"its machine is gone: {machine.refused or machine.reason}")


def _is_held(session: Session, machine: Machine) -> bool:
    attempt = session.get(Attempt, (machine.run_id, machine.epoch))
    return attempt is not None and not AttemptState(attempt.state).is_terminal
