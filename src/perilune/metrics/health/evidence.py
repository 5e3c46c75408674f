"""The input of the rules of a run's health, and what a rule finds."""

from dataclasses import dataclass, field
from typing import Literal

from perilune.metrics.health.series import Series
from perilune.metrics.rounding import ROUNDING, Rounding

Status = Literal["healthy", "watch", "broken"]

SOLVED_PASS_RATE = 0.8  # pass rate from which equal answers mean that the tasks are solved
TRUNCATED_SHARE = 0.25  # share of answers


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a run.

    Attributes:
        name: a short name, such as "dead groups".
        since: the step at which it began; None if it is not a matter of steps.
        why: the observation, with figures.
        remedy: what to do.
    """

    name: str
    status: Status
    since: int | None
    why: str
    remedy: str


@dataclass(frozen=True)
class Evidence:
    """The input of the rules.

    Attributes:
        metrics, timings: the lines of metrics.jsonl and timings.jsonl.
        samples: samples of a group; 1 if unknown.
        max_staleness: bound on the age of a token in updates, if the run has one.
        rounding: the bounds of the run's own check on the log-probs of engine and learner.
        open_seconds: time since the last line of a live run; None for a run that has ended.
        silent_seconds: time since the last heartbeat of a live run; None if that is not known.
    """

    metrics: Series
    timings: Series = field(default_factory=lambda: Series([]))
    samples: int = 1
    max_staleness: float | None = None
    rounding: Rounding = ROUNDING["float32", "cpu"]
    open_seconds: float | None = None
    silent_seconds: float | None = None
