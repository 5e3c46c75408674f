"""The next operations for a rented machine: a pure function of its desired, recorded and observed state.

Two rules always hold. Missing information never justifies an irreversible operation; the end of the lease,
the user and the end of the attempt do. And a machine is gone once its provider has confirmed it twice, some
time apart.
"""

from dataclasses import dataclass
from enum import StrEnum

from perilune.control.machines.leases import Lease, compute_cost
from perilune.control.record.clock import Instant
from perilune.control.record.transitions import MachineState
from perilune.execution.processes import Presence
from perilune.execution.providers.protocol import MachineStatus, Sighting

CONFIRM_INTERVAL_S = 2.0  # seconds between two observations that count as independent
CREATE_INTERVAL_S = 5.0  # seconds between two requests to create the same machine


class Desire(StrEnum):
    """The purpose for which its attempt still needs a machine."""

    HELD = "held"  # the attempt runs, or will run, on it
    AWAITED = "awaited"  # the attempt has succeeded, and the next stage takes the machine over
    COLLECTED = "collected"  # the attempt has ended, and its files still have to be fetched
    RELEASED = "released"  # nothing


class Operation(StrEnum):
    """An operation on a machine."""

    CREATE = "create"  # with the same key every time
    READY = "ready"
    DRAIN = "drain"
    MARK_TERMINATING = "mark_terminating"  # irreversible
    TERMINATE = "terminate"  # ask the provider to end it
    RECORD_MISSING = "record_missing"  # first observation that did not find it alive
    RECORD_FOUND = "record_found"  # it is there after all
    RECORD_GONE = "record_gone"


@dataclass(frozen=True, slots=True)
class RecordedMachine:
    """The recorded state of a machine.

    Attributes:
        leased: start of its lease.
        asked: last request to create it; None before the first.
        refused: whether the provider refused the last request to create it.
        missing_since: first of the latest consecutive observations that did not find it alive.
        idle_since: since when no attempt needs it.
        visibility: seconds after which operations are visible in the provider's answers.
    """

    state: MachineState
    lease: Lease
    price: float
    leased: Instant
    asked: Instant | None = None
    refused: bool = False
    missing_since: Instant | None = None
    idle_since: Instant | None = None
    visibility: float = 0.0

    def accrued_cost(self, now: Instant) -> float:
        """Return the upper bound of its cost so far, counted from the request."""
        return compute_cost(self.price, now.since(self.leased))


@dataclass(frozen=True, slots=True)
class Plan:
    """Operations in order, and the reason for them."""

    operations: tuple[Operation, ...] = ()
    reason: str = ""


def plan_machine(  # noqa: PLR0911 - one return per row of the table
    desire: Desire, recorded: RecordedMachine, sighting: Sighting, now: Instant
) -> Plan:
    """Return the next operations for one machine.

    Args:
        sighting: the latest observation, made after everything that is recorded.
        now: the time of that observation.
    """
    absent = _is_absent(sighting)
    if recorded.state is MachineState.GONE:
        again = Plan(
            (Operation.MARK_TERMINATING, Operation.TERMINATE), "it was listed again after it was gone"
        )
        return Plan() if absent is not False else again
    evidence = _absence_evidence(recorded, absent, now)
    if recorded.state is MachineState.TERMINATING:
        return _plan_terminating(sighting, evidence)
    if why := _termination_reason(desire, recorded, now):
        return Plan((Operation.MARK_TERMINATING, Operation.TERMINATE), why)
    if recorded.state is MachineState.REQUESTED:
        return _plan_requested(recorded, sighting, absent, evidence, now)
    if absent:
        return Plan(evidence, _gone_reason(sighting))
    ended, leaves = desire is Desire.COLLECTED, _is_being_preempted(sighting)
    if recorded.state is MachineState.READY and (ended or leaves):
        why = "its attempt has ended" if ended else "its provider preempts it"
        return Plan((*evidence, Operation.DRAIN), why)
    return Plan(evidence)


def _termination_reason(desire: Desire, recorded: RecordedMachine, now: Instant) -> str:
    """Return the reason why a machine must be terminated, or ""."""
    lease, age = recorded.lease, now.since(recorded.leased)
    unused = desire in {Desire.COLLECTED, Desire.AWAITED} and recorded.state is MachineState.REQUESTED
    if desire is Desire.RELEASED or unused:
        return "no longer needed"
    if age >= lease.max_lifetime:
        return f"it has reached its max_lifetime of {lease.max_lifetime:g} s"
    if recorded.accrued_cost(now) >= lease.max_cost:
        return f"it has reached its max_cost of {lease.max_cost:g}"
    if recorded.idle_since is not None and now.since(recorded.idle_since) >= lease.idle:
        return f"no attempt has needed it for {lease.idle:g} s"
    if recorded.state is MachineState.REQUESTED and age >= lease.ready_within:
        return f"it was not ready within {lease.ready_within:g} s"
    return ""


def _plan_requested(
    recorded: RecordedMachine,
    sighting: Sighting,
    absent: bool | None,
    evidence: tuple[Operation, ...],
    now: Instant,
) -> Plan:
    status = sighting.machine.status if sighting.machine is not None else None
    if status is MachineStatus.RUNNING:
        return Plan((*evidence, Operation.READY))
    if status is MachineStatus.ENDED:
        return Plan(evidence, _gone_reason(sighting))
    if absent and recorded.refused:
        return Plan((Operation.MARK_TERMINATING,), "its provider refused to create it")
    late = recorded.asked is None or now.since(recorded.asked) > max(recorded.visibility, CREATE_INTERVAL_S)
    return Plan((Operation.CREATE,)) if absent and late else Plan()


def _plan_terminating(sighting: Sighting, evidence: tuple[Operation, ...]) -> Plan:
    """Terminate again at every observation until it is proven gone, even if it was never seen."""
    if Operation.RECORD_GONE in evidence:
        return Plan(evidence)
    ended = sighting.machine is not None and sighting.machine.status is MachineStatus.ENDED
    return Plan(evidence if ended else (*evidence, Operation.TERMINATE))


def _is_absent(sighting: Sighting) -> bool | None:
    """Return whether an observation did not find the machine alive; None if the observation failed."""
    if sighting.presence is Presence.UNKNOWN:
        return None
    return sighting.machine is None or sighting.machine.status is MachineStatus.ENDED


def _absence_evidence(recorded: RecordedMachine, absent: bool | None, now: Instant) -> tuple[Operation, ...]:
    """Return the operations that record evidence that the machine is gone, or was never created."""
    if absent is None:
        return ()
    if not absent:
        return (Operation.RECORD_FOUND,) if recorded.missing_since is not None else ()
    if recorded.missing_since is None:
        return (Operation.RECORD_MISSING,)
    gap = max(recorded.visibility, CONFIRM_INTERVAL_S)
    settled = recorded.asked is None or now.since(recorded.asked) > gap
    return (Operation.RECORD_GONE,) if now.since(recorded.missing_since) >= gap and settled else ()


def _is_being_preempted(sighting: Sighting) -> bool:
    machine = sighting.machine
    return machine is not None and (
        machine.notice_seconds is not None or machine.status is MachineStatus.ENDING
    )


def _gone_reason(sighting: Sighting) -> str:
    reason = sighting.machine.reason if sighting.machine is not None else ""
    return reason or "its provider no longer lists it"
