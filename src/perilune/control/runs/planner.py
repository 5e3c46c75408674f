"""The next step for an attempt: a pure function of its recorded and its observed state."""

import random
from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from perilune.control.record.transitions import AttemptState
from perilune.execution.observation import Observation
from perilune.execution.processes import Presence
from perilune.execution.verdict import Cause
from perilune.frozen import Frozen

MAX_STARTS = 3  # workers that may die before they claim the attempt

STATES_BEFORE_START = frozenset({AttemptState.PLANNED, AttemptState.PROVISIONING, AttemptState.STAGING})


class Step(StrEnum):
    """A step of the reconciler for an attempt."""

    WAIT = "wait"
    STAGE = "stage"
    START = "start"
    START_FAILED = "start_failed"
    ADOPT = "adopt"  # its worker lives: record it as running
    FINALIZE = "finalize"  # it has left a verdict
    DIED = "died"  # its worker is proven dead and left no verdict
    UNREACHABLE = "unreachable"  # unknown: record a condition, and do nothing else
    LOSE = "lose"  # unreachable for longer than the policy or the user waits, or replaced by a newer attempt
    REFUSED = "refused"  # the machine is the wrong one or refuses access, and nothing has started there
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything besides the state and the observation that decides about the next step.

    Attributes:
        cancel: whether the user wants the attempt stopped.
        force: whether the user gives it up if it is unreachable.
        starting: whether a worker that this process started lives and has not claimed the attempt yet.
        starts: number of workers that have been started for the attempt.
        unseen_seconds: how long the attempt has been unreachable.
        lost_after: seconds after which an unreachable attempt is abandoned.
    """

    cancel: bool = False
    force: bool = False
    starting: bool = False
    starts: int = 0
    unseen_seconds: float = 0.0
    lost_after: float = 1800.0


def next_step(  # noqa: PLR0911 - one return per row of the table
    state: AttemptState, observation: Observation, situation: Situation
) -> Step:
    """Return the next step for an attempt of the current epoch.

    Args:
        observation: the latest observation.
    """
    if state.is_terminal:
        return Step.WAIT
    if observation.verdict is not None:
        return Step.FINALIZE
    if observation.superseded:
        return Step.LOSE
    if observation.refused and state in STATES_BEFORE_START:
        return Step.REFUSED
    if observation.is_hidden:
        lost = situation.force or situation.unseen_seconds >= situation.lost_after
        return Step.LOSE if lost else Step.UNREACHABLE
    if situation.cancel:
        return Step.STOP
    if observation.claim is None:
        return _next_unclaimed_step(state, situation.starting, situation.starts)
    if observation.worker is Presence.ABSENT:
        return Step.DIED
    return Step.WAIT if state in {AttemptState.RUNNING, AttemptState.FINALIZING} else Step.ADOPT


def _next_unclaimed_step(state: AttemptState, starting: bool, starts: int) -> Step:
    if state in STATES_BEFORE_START:
        return Step.STAGE
    if state is not AttemptState.STARTING:
        return Step.DIED  # it has run, and its files are gone
    if starting:
        return Step.WAIT
    return Step.START_FAILED if starts >= MAX_STARTS else Step.START


class RetryClass(StrEnum):
    """The retry budget that a failure counts against."""

    INFRASTRUCTURE = "infrastructure"
    PREEMPTION = "preemption"
    LOST = "lost"
    USER = "user"


RETRY_CLASSES = {
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
}  # every other cause counts as USER


class Retry(Frozen):
    """The number of attempts that may follow failures, by class of failure."""

    infrastructure: int = Field(5, ge=0, description="retries after a failure of the machine or of Perilune")
    lost: int = Field(5, ge=0, description="retries after contact with the attempt was lost")
    user: int = Field(0, ge=0, description="retries after a failure of the task itself")
    base: float = Field(
        0.5,
        gt=0,
        description="base of the waiting times in seconds; the n-th retry waits a random time up to"
        " base * 2**(n - 1)",
    )
    cap: float = Field(300.0, gt=0, description="longest wait before a retry, in seconds")


class RetryPolicy(Retry):
    """The retries of a run; an attempt may be unreachable for `lost_after` seconds."""

    lost_after: float = 1800.0

    def allows_retry(self, cause: str, before: list[str]) -> bool:
        """Return whether a retry may follow a failure with `cause`, after failures with causes `before`."""
        kind = retry_class(cause)
        if kind is RetryClass.PREEMPTION:
            return True
        used = sum(retry_class(earlier) is kind for earlier in before)
        return used < int(getattr(self, kind.value))

    def sample_delay(self, attempts: int) -> float:
        """Return a random number of seconds to wait after `attempts` attempts (full jitter)."""
        return random.uniform(0.0, self.max_delay(attempts))

    def max_delay(self, attempts: int) -> float:
        """Return the upper bound of `sample_delay` in seconds."""
        return min(self.cap, self.base * 2.0 ** min(attempts, 100))


def retry_class(cause: str) -> RetryClass:
    return RETRY_CLASSES.get(Cause(cause), RetryClass.USER)
