"""What to do next for an attempt: a pure function of what is recorded and what is seen."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from perilune.control.record.transitions import AttemptState
from perilune.execution.observation import Observation
from perilune.execution.processes import Presence
from perilune.execution.verdict import Cause

MAX_STARTS = 3  # workers that may die before their claim

BEFORE_START = frozenset({AttemptState.PLANNED, AttemptState.PROVISIONING, AttemptState.STAGING})


class Step(StrEnum):
    """What the reconciler does about an attempt."""

    WAIT = "wait"
    STAGE = "stage"
    START = "start"
    START_FAILED = "start_failed"
    ADOPT = "adopt"  # its worker lives: it is running
    FINALIZE = "finalize"  # it has left a verdict
    DIED = "died"  # its worker is positively dead and left no verdict
    UNREACHABLE = "unreachable"  # cannot be seen: a condition, nothing is done
    LOSE = "lose"  # not seen for as long as the policy or the user waits, or a newer attempt has begun
    REFUSED = "refused"  # the place is the wrong machine or lets nobody in, and nothing was begun there
    STOP = "stop"


def next_step(  # noqa: PLR0911 - one return a row of the table
    state: AttemptState,
    seen: Observation,
    *,
    cancel: bool = False,
    force: bool = False,
    starting: bool = False,
    starts: int = 0,
    unseen_seconds: float = 0.0,
    lost_after: float = 1800.0,
) -> Step:
    """The next step for an attempt of the current epoch.

    Args:
        state: as recorded.
        seen: the latest look at it.
        cancel: whether the user wants it stopped.
        force: whether the user gives it up when it cannot be seen.
        starting: whether a worker started by us lives and has not claimed yet.
        starts: how many workers have been started for it.
        unseen_seconds: how long it has been out of sight.
        lost_after: how long it may be, before it is given up.
    """
    if state.terminal:
        return Step.WAIT
    if seen.verdict is not None:
        return Step.FINALIZE
    if seen.superseded:
        return Step.LOSE
    if seen.refused and state in BEFORE_START:
        return Step.REFUSED
    if seen.hidden:
        return Step.LOSE if force or unseen_seconds >= lost_after else Step.UNREACHABLE
    if cancel:
        return Step.STOP
    if seen.claim is None:
        return _unclaimed(state, starting, starts)
    if seen.worker is Presence.ABSENT:
        return Step.DIED
    return Step.WAIT if state in {AttemptState.RUNNING, AttemptState.FINALIZING} else Step.ADOPT


def _unclaimed(state: AttemptState, starting: bool, starts: int) -> Step:
    if state in BEFORE_START:
        return Step.STAGE
    if state is not AttemptState.STARTING:
        return Step.DIED  # it ran, and the evidence of it is gone
    if starting:
        return Step.WAIT
    return Step.START_FAILED if starts >= MAX_STARTS else Step.START


class RetryClass(StrEnum):
    """Whose fault an ended attempt was."""

    INFRASTRUCTURE = "infrastructure"
    PREEMPTION = "preemption"
    LOST = "lost"
    USER = "user"


CLASS_OF = {
    Cause.RUNNER_DIED: RetryClass.INFRASTRUCTURE,
    Cause.START_FAILED: RetryClass.INFRASTRUCTURE,
    Cause.KILLED: RetryClass.INFRASTRUCTURE,
    Cause.PROCESS_LOST: RetryClass.INFRASTRUCTURE,
    Cause.NO_MACHINE: RetryClass.INFRASTRUCTURE,
    Cause.TRANSFER_FAILED: RetryClass.INFRASTRUCTURE,
    Cause.STOPPED: RetryClass.PREEMPTION,
    Cause.PREEMPTED: RetryClass.PREEMPTION,
    Cause.UNREACHABLE: RetryClass.LOST,
    Cause.MACHINE_LOST: RetryClass.LOST,
}  # everything else is the user's


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often an ended attempt is followed by another, by class, and after how long.

    Attributes:
        infrastructure: the worker died or could not start.
        lost: nothing was heard of it.
        user: the task failed by itself.
        base, cap: seconds; the n-th retry of a class waits between 0 and min(cap, base 2^n), at random.
        lost_after: seconds that an attempt may be out of sight.
    """

    infrastructure: int = 5
    lost: int = 5
    user: int = 0
    base: float = 0.5
    cap: float = 300.0
    lost_after: float = 1800.0

    def allows(self, cause: str, before: list[str]) -> bool:
        """Whether another attempt may follow one that ended by `cause`, after earlier ones by `before`."""
        kind = retry_class(cause)
        if kind is RetryClass.PREEMPTION:
            return True
        used = sum(retry_class(earlier) is kind for earlier in before)
        return used < int(getattr(self, kind.value))

    def delay(self, attempts: int) -> float:
        """Seconds to wait before the attempt that follows `attempts` others: full jitter."""
        return random.uniform(0.0, self.longest(attempts))

    def longest(self, attempts: int) -> float:
        """Seconds that are waited at most then."""
        return min(self.cap, self.base * 2.0 ** min(attempts, 100))


def retry_class(cause: str) -> RetryClass:
    """Whose fault a cause is."""
    return CLASS_OF.get(Cause(cause), RetryClass.USER)
