"""Events of an experiment, for whoever displays them. The control plane itself prints nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
