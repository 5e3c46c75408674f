"""Events of an experiment, for whoever displays them. The control plane itself prints nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from perilune.errors import PeriluneError, RequestError, WorkFailedError
from perilune.execution.verdict import Cause

# Causes with exit code 2.
REQUEST_CAUSES = frozenset({Cause.REQUEST, Cause.DISK_FULL, Cause.BUNDLE_REJECTED, Cause.HOST_REFUSED})

REMEDY_PREFIX = "  try: "  # begins the last line of an error that has a remedy


@dataclass(frozen=True, slots=True)
class StageEvent:
    """An event of a stage."""

    stage: str
    run_id: str


@dataclass(frozen=True, slots=True)
class StageStarted(StageEvent):
    """The stage started, or was live already (`attached`). `position` counts from 1 to `stages`."""

    task: str
    position: int
    stages: int
    attached: bool


@dataclass(frozen=True, slots=True)
class StageProgress(StageEvent):
    """Progress of the stage; `figures` come from the task, `attempt` is the number of the attempt."""

    attempt: int
    done: int
    total: int
    unit: str
    figures: Mapping[str, float]

    @classmethod
    def of(cls, stage: str, run_id: str, attempt: int, progress: Mapping[str, Any]) -> Self:
        """Return the event for what `read_progress` read."""
        done, total, unit = int(progress["done"]), int(progress["total"]), str(progress["unit"])
        return cls(stage, run_id, attempt, done, total, unit, progress["figures"])


@dataclass(frozen=True, slots=True)
class StageResumed(StageEvent):
    """Attempt `attempt` follows the one before, which ended with `cause` and `message`."""

    attempt: int
    cause: str
    message: str


@dataclass(frozen=True, slots=True)
class StageNotice(StageEvent):
    """A message about attempt `attempt`, for example that it starts from the beginning."""

    attempt: int
    message: str


@dataclass(frozen=True, slots=True)
class StageReused(StageEvent):
    """The same bundle has succeeded before; its result is reused."""

    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StageFinished(StageEvent):
    """The stage succeeded after `seconds`."""

    summary: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True, slots=True)
class StageFailed(StageEvent):
    """The stage failed or was `cancelled`. Later stages did not start."""

    cause: str
    message: str
    log_tail: str = field(repr=False)
    cancelled: bool = False


def explain_failure(event: StageFailed) -> PeriluneError:
    """Return the error for a failed stage: RequestError if the request was wrong, else WorkFailedError."""
    kind = RequestError if event.cause in REQUEST_CAUSES else WorkFailedError
    where = f"stage {event.stage}, run {event.run_id}"
    if event.cancelled:
        return kind(
            "cancelled", where=where, remedy="run the same command to continue from its last checkpoint"
        )
    what, _, own_remedy = (event.message or event.cause).partition(f"\n{REMEDY_PREFIX}")
    log = "".join(f"\n    {line}" for line in event.log_tail.splitlines())
    tail = f"\n  end of its log:{log}" if event.cause == Cause.CRASHED else ""
    remedy = f"perilune logs {event.run_id}; or run the same command to retry from the last checkpoint"
    if event.cause == Cause.DISK_FULL:
        remedy = "free some space (`perilune gc` lists files to delete), then run the same command again"
    elif kind is RequestError:
        remedy = "fix that, then run the same command again"
    return kind(what + tail, where=where, remedy=own_remedy or remedy)
