"""What to do next about a rented machine: a pure function of what is wanted, recorded and seen.

Two rules hold everywhere. Not knowing justifies nothing that cannot be taken back: the end of a lease, the
user and the end of the attempt do. And a machine is gone when its provider said so twice, some time apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from perilune.control.machines.leases import Lease, cost
from perilune.control.record.clock import Instant
from perilune.control.record.transitions import MachineState
from perilune.execution.processes import Presence
from perilune.execution.providers.protocol import MachineStatus, Sighting

LEAST_GAP = 2.0  # seconds between two looks that are to be two
ASK_GAP = 5.0  # seconds between two requests to make the same machine


class Desire(StrEnum):
    """What the attempt of a machine still needs it for."""

    HELD = "held"  # it runs, or is to run, there
    COLLECTED = "collected"  # it has ended; what it left there is still to be fetched
    RELEASED = "released"  # nothing


class Operation(StrEnum):
    """What is done about a machine."""

    CREATE = "create"  # with the same key as every time before
    READY = "ready"
    DRAIN = "drain"
    MARK_TERMINATING = "mark_terminating"  # from now on it is to go, and nothing changes that
    TERMINATE = "terminate"  # ask the provider to end it
    RECORD_MISSING = "record_missing"  # the first look that did not find it alive
    RECORD_FOUND = "record_found"  # it is there after all
    RECORD_GONE = "record_gone"  # it is gone


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is known of a machine.

    Attributes:
        leased: from when its lease counts.
        asked: when its creation was last asked for; None when that was not begun.
        refused: whether the provider said that it made nothing, the last time it was asked.
        missing_since: the first of an unbroken row of looks that did not find it alive.
        idle_since: since when no attempt needs it.
        visibility: seconds that its provider's deeds may stay out of sight.
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

    def spent(self, now: Instant) -> float:
        """What it has cost so far, at most: counted from the request."""
        return cost(self.price, now.since(self.leased))


@dataclass(frozen=True, slots=True)
class Plan:
    """Operations in their order, and why."""

    operations: tuple[Operation, ...] = ()
    reason: str = ""


def plan_machine(  # noqa: PLR0911 - one return a row of the table
    desire: Desire, recorded: Recorded, seen: Sighting, now: Instant
) -> Plan:
    """What to do about one machine.

    Args:
        desire: what it is needed for.
        recorded: what is known of it.
        seen: the latest look, made after everything that is recorded.
        now: the moment of that look.
    """
    absent = _absent(seen)
    if recorded.state is MachineState.GONE:
        again = Plan((Operation.MARK_TERMINATING, Operation.TERMINATE), "it was seen again after it was gone")
        return Plan() if absent is not False else again
    evidence = _evidence(recorded, absent, now)
    if recorded.state is MachineState.TERMINATING:
        return _terminating(seen, evidence)
    if why := _condemned(desire, recorded, now):
        return Plan((Operation.MARK_TERMINATING, Operation.TERMINATE), why)
    if recorded.state is MachineState.REQUESTED:
        return _requested(recorded, seen, absent, evidence, now)
    if absent is not None and absent:
        return Plan(evidence, _why_gone(seen))
    ended, leaves = desire is not Desire.HELD, _leaves(seen)
    if recorded.state is MachineState.READY and (ended or leaves):
        why = "its attempt has ended" if ended else "its provider takes it away"
        return Plan((*evidence, Operation.DRAIN), why)
    return Plan(evidence)


def _condemned(desire: Desire, recorded: Recorded, now: Instant) -> str:
    """Why a machine is to go, or ""."""
    lease, age = recorded.lease, now.since(recorded.leased)
    unused = desire is Desire.COLLECTED and recorded.state is MachineState.REQUESTED
    if desire is Desire.RELEASED or unused:
        return "nothing needs it any more"
    if age >= lease.max_lifetime:
        return f"it has existed for its longest time, {lease.max_lifetime:g} s"
    if recorded.spent(now) >= lease.max_cost:
        return f"it has cost what it may cost, {lease.max_cost:g}"
    if recorded.idle_since is not None and now.since(recorded.idle_since) >= lease.idle:
        return f"no attempt has needed it for {lease.idle:g} s"
    if recorded.state is MachineState.REQUESTED and age >= lease.ready_within:
        return f"it was not ready within {lease.ready_within:g} s"
    return ""


def _requested(
    recorded: Recorded, seen: Sighting, absent: bool | None, evidence: tuple[Operation, ...], now: Instant
) -> Plan:
    status = seen.machine.status if seen.machine is not None else None
    if status is MachineStatus.RUNNING:
        return Plan((*evidence, Operation.READY))
    if status is MachineStatus.ENDED:
        return Plan(evidence, _why_gone(seen))
    if absent and recorded.refused:
        return Plan((Operation.MARK_TERMINATING,), "its provider made nothing")
    late = recorded.asked is None or now.since(recorded.asked) > max(recorded.visibility, ASK_GAP)
    return Plan((Operation.CREATE,)) if absent and late else Plan()


def _terminating(seen: Sighting, evidence: tuple[Operation, ...]) -> Plan:
    """Ask again at every look until it is proven; once is also asked of what was never seen."""
    if Operation.RECORD_GONE in evidence:
        return Plan(evidence)
    ended = seen.machine is not None and seen.machine.status is MachineStatus.ENDED
    return Plan(evidence if ended else (*evidence, Operation.TERMINATE))


def _absent(seen: Sighting) -> bool | None:
    """Whether a look did not find the machine alive; None when it saw nothing."""
    if seen.presence is Presence.UNKNOWN:
        return None
    return seen.machine is None or seen.machine.status is MachineStatus.ENDED


def _evidence(recorded: Recorded, absent: bool | None, now: Instant) -> tuple[Operation, ...]:
    """What the look adds to the evidence that it is gone. One that was never made is gone the same way."""
    if absent is None:
        return ()
    if not absent:
        return (Operation.RECORD_FOUND,) if recorded.missing_since is not None else ()
    if recorded.missing_since is None:
        return (Operation.RECORD_MISSING,)
    gap = max(recorded.visibility, LEAST_GAP)
    settled = recorded.asked is None or now.since(recorded.asked) > gap
    return (Operation.RECORD_GONE,) if now.since(recorded.missing_since) >= gap and settled else ()


def _leaves(seen: Sighting) -> bool:
    """Whether its provider has said that it will take it away."""
    machine = seen.machine
    return machine is not None and (
        machine.notice_seconds is not None or machine.status is MachineStatus.ENDING
    )


def _why_gone(seen: Sighting) -> str:
    return (
        seen.machine.reason if seen.machine is not None and seen.machine.reason else "its provider has it not"
    )
