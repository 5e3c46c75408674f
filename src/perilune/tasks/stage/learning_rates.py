"""The spec of a stage that learns, and what plan and log say of its learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from perilune.bundle.job import Job
from perilune.learn.learning_rates import default_lr, with_default_lr
from perilune.learn.training_settings import OptimizerSettings

Spec = TypeVar("Spec", bound=OptimizerSettings)


def read_spec(kind: type[Spec], job: Job, log: Callable[[str], None] | None = None) -> Spec:
    """The job's spec with a learning rate; a default is logged with its reason."""
    spec = kind.model_validate(with_default_lr(job.task, job.spec, job.model))
    if log is not None and _reason(spec, job):
        log(f"learning rate: {describe_learning_rate(spec, job)}")
    return spec


def describe_learning_rate(spec: OptimizerSettings, job: Job) -> str:
    """The plan's line: the schedule, and why the rate is what it is where it is the default."""
    reason = _reason(spec, job)
    return spec.describe_schedule() + (f"; {reason}" if reason else "")


def _reason(spec: OptimizerSettings, job: Job) -> str:
    rate, reason = default_lr(job.task, job.spec, job.model)
    return reason if spec.lr == rate else ""
