"""What happens while an experiment advances, for whoever shows it. The control plane prints nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StageEvent:
    """Something happened to a stage.

    Attributes:
        stage: its name.
        run_id: the run that stands for it.
    """

    stage: str
    run_id: str


@dataclass(frozen=True, slots=True)
class StageStarted(StageEvent):
    """Work on it has begun, or was found under way (`attached`). `position` counts from 1 of `stages`."""

    task: str
    position: int
    stages: int
    attached: bool


@dataclass(frozen=True, slots=True)
class StageProgress(StageEvent):
    """How far it is; `figures` are the task's own, `attempt` says which try."""

    attempt: int
    done: int
    total: int
    unit: str
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StageResumed(StageEvent):
    """Attempt `attempt` takes up what the one before could not finish, because of `cause`: `message`."""

    attempt: int
    cause: str
    message: str


@dataclass(frozen=True, slots=True)
class StageReused(StageEvent):
    """The same bundle had been run to success before; it is not run again."""

    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StageFinished(StageEvent):
    """It succeeded."""

    summary: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True, slots=True)
class StageFailed(StageEvent):
    """It failed, or was cancelled (`cancelled`). The stages after it were not begun."""

    cause: str
    message: str
    log_tail: str = field(repr=False)
    cancelled: bool = False
