"""The life cycle of rented machines: recorded before they are requested, reconciled until proven gone.

The intent of every side effect is committed before it, and its outcome after it. The machine's key identifies
each effect, so any process may repeat it.
"""

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from perilune.control.machines.handover import waits_for_next_stage
from perilune.control.machines.leases import Lease, Rental, compute_cost
from perilune.control.machines.listings import Listings
from perilune.control.machines.panic import PANIC_REASON as PANIC
from perilune.control.machines.panic import renting_is_stopped
from perilune.control.machines.planner import Desire, Operation, Plan, RecordedMachine, plan_machine
from perilune.control.machines.providers import Providers, cluster_id
from perilune.control.record.clock import Instant
from perilune.control.record.conditions import Conditions, cleanup_subject
from perilune.control.record.faults import kill_point
from perilune.control.record.home import Home
from perilune.control.record.identity import ADOPT_REMEDY, owns_machine
from perilune.control.record.ledger import record_done, record_intent, settle_intents
from perilune.control.record.store import Attempt, Machine, Store, clear_condition, record_event
from perilune.control.record.transitions import AttemptState, Cleanup, MachineState
from perilune.errors import PeriluneError, RequestError
from perilune.execution.processes import Presence
from perilune.execution.providers.protocol import (
    MachineKey,
    MachineRequest,
    MachineStatus,
    NoCapacityError,
    ProviderRefusedError,
    ProviderUnreachableError,
    Sighting,
)
from perilune.execution.verdict import describe_error

TERMINATE_INTERVAL_S = 5.0  # between two requests to terminate the same machine


@dataclass(frozen=True, slots=True)
class _Look:
    """An observation of a machine, and its record when it was observed."""

    machine: Machine
    recorded: RecordedMachine
    sighting: Sighting
    time: Instant


class Fleet:
    """The machines that one home rents."""

    def __init__(self, home: Home, store: Store, providers: Providers | None = None) -> None:
        self.home, self.store = home, store
        self.providers = providers or Providers(home)
        self.conditions = Conditions(store)
        self.listings = Listings(home, store, self.providers)
        self._last_terminated: dict[str, Instant] = {}

    def machine(self, key: str) -> Machine | None:
        with self.store.snapshot() as session:
            return session.get(Machine, key)

    def machines(self, *, include_gone: bool = False) -> list[Machine]:
        """Return this home's recorded machines, oldest first; those proven gone only with `include_gone`."""
        query = select(Machine).order_by(Machine.created)
        if not include_gone:
            query = query.where(Machine.state != MachineState.GONE.value)
        return [row for row in self.store.read(query) if include_gone or owns_machine(self.home, row.key)]

    def machine_key(self, run_id: str, epoch: int, rank: int = 0) -> str:
        return str(MachineKey(cluster_id(self.home), run_id, epoch, rank))

    def machines_of(self, run_id: str, epoch: int) -> list[Machine]:
        """Return the recorded machines of an attempt, the leading one first."""
        query = select(Machine).where(Machine.run_id == run_id, Machine.epoch == epoch)
        return self.store.read(query.order_by(Machine.rank))

    def rent(
        self, session: Session, attempt: Attempt, rental: Rental, price: float, nodes: int = 1
    ) -> list[Machine]:
        """Record new machines of an attempt in the caller's transaction; `reconcile` then requests them."""
        machines = [
            Machine(
                key=self.machine_key(attempt.run_id, attempt.number, rank),
                provider=rental.provider,
                run_id=attempt.run_id,
                epoch=attempt.number,
                rank=rank,
                kind=rental.kind,
                price=price,
                lease=rental.lease.model_dump(),
                leased=Instant.now()._asdict(),
                created=time.time(),
            )
            for rank in range(nodes)
        ]
        session.add_all(machines)
        session.flush()
        for machine in machines:
            _record_machine_event(session, machine, "machine.requested", offer=rental.kind, price=price)
        return machines

    def reconcile_all(self) -> None:
        """Reconcile every machine that is not proven gone."""
        for machine in self.machines():
            self.reconcile(machine.key)

    def reconcile(self, key: str) -> Machine | None:
        """Observe a machine and take the next operations; returns it as recorded then.

        Records an error as its condition instead of raising it.
        """
        machine = self.machine(key)
        if machine is None or not owns_machine(self.home, key):
            return machine
        with self.conditions.guard(machine.run_id, f"machine {key}"):
            self._reconcile(machine)
        return self.machine(key)

    def _reconcile(self, machine: Machine) -> None:
        if renting_is_stopped(self.home):
            self.request_termination(machine.key, PANIC)
        listing = self.listings.get(machine.provider)
        sighting = listing.sighting(machine.key)
        self._record_sighting(machine.key, sighting, listing.time)
        with self.store.snapshot() as session:
            machine = session.get_one(Machine, machine.key)
            desire = self._find_desire(session, machine)
        recorded = self._recorded_machine(machine)
        plan = plan_machine(desire, recorded, sighting, listing.time)
        for operation in plan.operations:
            self._apply(operation, _Look(machine, recorded, sighting, listing.time), plan)
        if sighting.presence is Presence.UNKNOWN and machine.state != MachineState.GONE:
            raise ProviderUnreachableError(f"{machine.provider} cannot say whether it exists: {sighting.why}")

    def request_termination(self, key: str, reason: str) -> None:
        """Record that a machine is to be terminated on the user's request, whatever runs on it.

        Raises:
            RequestError: another home rented it.
        """
        if not owns_machine(self.home, key):
            raise RequestError(
                "another home rented this machine", where=f"machine {key}", remedy=ADOPT_REMEDY
            )
        machine = self.machine(key)
        if machine is not None and machine.state not in {MachineState.TERMINATING, MachineState.GONE}:
            self._mark_terminating(machine, reason)

    def _recorded_machine(self, machine: Machine) -> RecordedMachine:
        try:
            visibility = self.providers.get(machine.provider).capabilities.visibility_seconds
        except PeriluneError:
            visibility = 0.0  # the provider is unreachable until it is configured again
        return RecordedMachine(
            state=MachineState(machine.state),
            lease=Lease.model_validate(machine.lease),
            price=machine.price,
            leased=Instant(**machine.leased),
            asked=_parse_instant(machine.asked),
            refused=bool(machine.refused),
            missing_since=_parse_instant(machine.missing_since),
            idle_since=_parse_instant(machine.idle_since),
            visibility=visibility,
        )

    def _record_sighting(self, key: str, sighting: Sighting, now: Instant) -> None:
        with self.store.snapshot() as session:
            machine = session.get_one(Machine, key)
            idle = self._find_desire(session, machine) is not Desire.HELD
        silent = sighting.presence is Presence.UNKNOWN
        noticed = sighting.machine is not None and sighting.machine.notice_seconds is not None
        changed = (
            silent != (machine.unseen_since is not None)
            or (noticed and not machine.notice)
            or idle != (machine.idle_since is not None)
        )
        if changed and machine.state != MachineState.GONE:
            with self.store.transaction() as session:
                row = session.get_one(Machine, key)
                if noticed and not row.notice:
                    _record_machine_event(
                        session, row, "machine.preemption_notice", reason="its provider preempts it"
                    )
                if silent != (row.unseen_since is not None):
                    _record_machine_event(
                        session,
                        row,
                        "machine.unreachable" if silent else "machine.reachable",
                        why=sighting.why,
                    )
                row.notice = row.notice or noticed
                row.unseen_since = (row.unseen_since or now._asdict()) if silent else None
                if _has_same_attempt(row, machine):
                    row.idle_since = (row.idle_since or now._asdict()) if idle else None

    def _find_desire(self, session: Session, machine: Machine) -> Desire:
        attempt = session.get(Attempt, (machine.run_id, machine.epoch))
        if attempt is None:
            return Desire.RELEASED
        if not AttemptState(attempt.state).is_terminal:
            return Desire.HELD
        if waits_for_next_stage(self.home, session, machine):
            return Desire.AWAITED
        return Desire.COLLECTED if attempt.cleanup == Cleanup.PENDING else Desire.RELEASED

    def _apply(self, operation: Operation, look: _Look, plan: Plan) -> None:
        match operation:
            case Operation.CREATE:
                self._create(look.machine, look.recorded)
            case Operation.READY:
                self._move_if_unchanged(look, MachineState.READY, "")
            case Operation.DRAIN:
                self._move_if_unchanged(look, MachineState.DRAINING, plan.reason)
            case Operation.MARK_TERMINATING:
                self._mark_terminating(look.machine, plan.reason, unless_taken_over=True)
            case Operation.TERMINATE:
                self._terminate(look.machine)
            case Operation.RECORD_MISSING | Operation.RECORD_FOUND:
                self._record_missing(look, operation is Operation.RECORD_MISSING)
            case Operation.RECORD_GONE:
                self._record_gone(look, plan.reason)

    def _record_missing(self, look: _Look, missing: bool) -> None:
        with self.store.transaction() as session:
            row = session.get_one(Machine, look.machine.key)
            row.missing_since = (row.missing_since or look.time._asdict()) if missing else None
            _record_machine_event(session, row, "machine.missing" if missing else "machine.found")

    def _create(self, machine: Machine, recorded: RecordedMachine) -> None:
        """Request the machine under its key, which finds the machine of an earlier request."""
        if renting_is_stopped(self.home):
            return
        asked = Instant.now()
        with self.store.transaction() as session:
            row = session.get_one(Machine, machine.key)
            if row.state != MachineState.REQUESTED:
                return
            row.asked = asked._asdict()
            key = record_intent(session, session.get_one(Attempt, (row.run_id, row.epoch)), "create")
        kill_point("create.intended")
        lifetime = max(1.0, recorded.lease.max_seconds(machine.price) - asked.since(recorded.leased))
        provider = self.providers.get(machine.provider)
        detail: dict[str, str] = {}
        try:
            nodes = len(self.machines_of(machine.run_id, machine.epoch))
            made = provider.create(machine.key, MachineRequest(machine.kind, lifetime, nodes))
        except ProviderUnreachableError as error:
            with self.store.transaction() as session:
                _record_machine_event(session, machine, "machine.create_unanswered", why=str(error))
            return
        except NoCapacityError as error:
            made, detail = None, {"none": str(error)}
        except ProviderRefusedError as error:
            made, detail = None, {"refused": str(error)}
        finally:
            self.listings.forget(machine.provider)
        kill_point("create.done")
        with self.store.transaction() as session:
            record_done(session, key)
            row = session.get_one(Machine, machine.key)
            row.remote_id = made.id if made else row.remote_id
            row.refused = detail.get("refused", "")
            _record_machine_event(
                session, row, "machine.created" if made else "machine.not_created", **detail
            )
        kill_point("create.committed")

    def _mark_terminating(self, machine: Machine, reason: str, *, unless_taken_over: bool = False) -> None:
        """Record the intent to terminate a machine, before its provider is asked."""
        with self.store.transaction() as session:
            row = session.get_one(Machine, machine.key)
            if row.state == MachineState.TERMINATING or (
                unless_taken_over and not _has_same_attempt(row, machine)
            ):
                return
            row.missing_since, row.ended = None, None
            _move_machine(session, row, MachineState.TERMINATING, reason)
            attempt = session.get(Attempt, (row.run_id, row.epoch))
            if attempt is not None:
                record_intent(session, attempt, "terminate")
        kill_point("terminate.intended")

    def _terminate(self, machine: Machine) -> None:
        """Ask the provider to terminate a machine. Later observations prove whether that happened."""
        now, last = Instant.now(), self._last_terminated.get(machine.key)
        if last is not None and now.since(last) < TERMINATE_INTERVAL_S:
            return
        recorded = self.machine(machine.key)
        if recorded is None or recorded.state != MachineState.TERMINATING:
            return  # an attempt has taken it over
        self._last_terminated[machine.key] = now
        try:
            self.providers.get(machine.provider).terminate(machine.key)
            why = ""
        except Exception as error:
            why = describe_error(error)
        kill_point("terminate.done")
        self.listings.forget(machine.provider)
        with self.store.transaction() as session:
            row = session.get_one(Machine, machine.key)
            row.terminate_calls += 1
            if why or row.terminate_calls == 1:
                _record_machine_event(session, row, "machine.terminate_requested", why=why)

    def _record_gone(self, look: _Look, reason: str) -> None:
        """Record that a machine is gone: its cost is final, and nothing of its attempt is left on it."""
        listed = look.sighting.machine
        with self.store.transaction() as session:
            row = session.get_one(Machine, look.machine.key)
            if row.state == MachineState.GONE:
                return
            row.cost = look.recorded.accrued_cost(look.recorded.missing_since or look.time)  # upper bound
            if listed is not None and listed.status is MachineStatus.ENDED:
                row.cost = max(0.0, min(row.cost, compute_cost(row.price, listed.billed_seconds)))
            row.ended = max(row.created, time.time())
            _move_machine(session, row, MachineState.GONE, reason)
            attempt = session.get(Attempt, (row.run_id, row.epoch))
            if attempt is not None and _others_are_gone(session, row):
                settle_intents(session, attempt, "create", "terminate")
                if attempt.cleanup == Cleanup.PENDING:
                    attempt.cleanup = Cleanup.DONE.value
                    clear_condition(session, row.run_id, cleanup_subject(row.epoch))
                    record_event(session, "attempt.cleaned_up", run_id=row.run_id, epoch=row.epoch)
        self._last_terminated.pop(look.machine.key, None)
        kill_point("gone.committed")

    def _move_if_unchanged(self, look: _Look, state: MachineState, reason: str) -> None:
        with self.store.transaction() as session:
            row = session.get_one(Machine, look.machine.key)
            if row.state != look.machine.state or not _has_same_attempt(row, look.machine):
                return  # another process was faster
            if look.sighting.machine is not None:
                row.remote_id = look.sighting.machine.id
            attempt = session.get(Attempt, (row.run_id, row.epoch))
            if state is MachineState.READY and attempt is not None:
                settle_intents(session, attempt, "create")
            _move_machine(session, row, state, reason)
        kill_point(f"machine.{state.value}")


def _has_same_attempt(row: Machine, machine: Machine) -> bool:
    """Return whether the attempt that has the machine is the one that had it when `machine` was read."""
    return (row.run_id, row.epoch) == (machine.run_id, machine.epoch)


def _others_are_gone(session: Session, machine: Machine) -> bool:
    others = select(Machine.key).where(
        Machine.run_id == machine.run_id, Machine.epoch == machine.epoch, Machine.key != machine.key
    )
    return session.scalars(others.where(Machine.state != MachineState.GONE.value)).first() is None


def _move_machine(session: Session, row: Machine, state: MachineState, reason: str) -> None:
    row.state = state.value
    row.reason = reason or row.reason
    _record_machine_event(session, row, f"machine.{state.value}", **({"reason": reason} if reason else {}))


def _record_machine_event(session: Session, row: Machine, kind: str, **detail: Any) -> None:
    record_event(session, kind, run_id=row.run_id, epoch=row.epoch, machine=row.key, **detail)


def _parse_instant(fields: dict[str, Any] | None) -> Instant | None:
    return None if fields is None else Instant(**fields)
