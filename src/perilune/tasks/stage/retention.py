"""Checkpoint retention: a stage keeps its newest checkpoints, and the best by one of its metrics."""

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from perilune.bundle.workspace import Workspace
from perilune.errors import RequestError, did_you_mean
from perilune.frozen import Frozen
from perilune.metrics.bootstrap import Interval, bootstrap_problems
from perilune.metrics.held_out import LOWER_IS_BETTER, list_evaluations
from perilune.models.memory import MemoryPlan
from perilune.plural import plural
from perilune.tasks.stage.defaults import ModelDefaults

STEP_PREFIX = "step-"
FINAL = "final"
BEST = "best"


class Keep(Frozen):
    """The checkpoints that a stage keeps."""

    last: int = Field(1, ge=1, description="number of newest checkpoints to keep, counting the final one")
    best: str | None = Field(
        None,
        description="metric by which the best checkpoint is kept too: that with the highest value, or"
        " with the lowest value of a loss or nll",
    )
    optimizer: bool = Field(
        False, description="keep the optimizer state beside the final weights, for restore_optimizer"
    )


def _check_only_newest(keep: Keep) -> Keep:
    if keep != Keep(last=keep.last):
        raise ValueError("this stage keeps its newest checkpoints and nothing else. Set only keep.last")
    return keep


KeepNewest = Annotated[Keep, AfterValidator(_check_only_newest)]
"""Type of `keep` in a stage without evaluations, whose output no other stage trains further."""


class TrainingSpec(ModelDefaults):
    """Fields of every stage that trains."""

    steps: int
    save_every: int = Field(20, ge=1, description="steps between checkpoints to resume from")
    keep: Keep = Field(Keep(), description="which checkpoints to keep")


def missing_optimizer_error() -> RequestError:
    """Return the error of `restore_optimizer` without an optimizer state."""
    return RequestError(
        "the model that this stage starts from has no optimizer state",
        where="restore_optimizer",
        remedy="set keep: {optimizer: true} in the stage that trains it, or drop restore_optimizer",
    )


def step_directory(workspace: Workspace, step: int) -> Path:
    return workspace.checkpoints / f"{STEP_PREFIX}{step:06d}"


def saved_steps(workspace: Workspace) -> list[int]:
    """Return the steps that have a checkpoint, in order."""
    return sorted(
        int(path.name.removeprefix(STEP_PREFIX)) for path in workspace.checkpoints.glob(f"{STEP_PREFIX}*")
    )


def remove_checkpoint(directory: Path) -> None:
    """Remove a checkpoint. A kill in the middle leaves a hidden directory, which nothing reads."""
    hidden = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.old")
    directory.rename(hidden)
    shutil.rmtree(hidden)


def prune_checkpoints(workspace: Workspace, spec: TrainingSpec, *, saved_elsewhere: int = 0) -> None:
    """Remove the checkpoints of steps that the spec doesn't keep.

    Args:
        saved_elsewhere: number of kept checkpoints that are newer than those of steps, such as the final one.
    """
    steps = saved_steps(workspace)
    newest = steps[max(0, len(steps) - max(0, spec.keep.last - saved_elsewhere)) :]
    best = best_step(workspace, spec, steps)
    for step in steps:
        if step not in newest and step != best:
            remove_checkpoint(step_directory(workspace, step))


def best_metric(workspace: Workspace, spec: TrainingSpec) -> str | None:
    """Return the metric of the best checkpoint: that of the evaluations, or `keep.best`."""
    evaluation = getattr(spec, "eval", None)
    return spec.keep.best if evaluation is None else evaluation.figure(workspace.job.environment)


def metric_at(workspace: Workspace, spec: TrainingSpec, step: int) -> Interval | None:
    """Return the evaluation's metric at a checkpoint, or without `eval` the mean of `keep.best`.

    The mean is over the `save_every` steps before the checkpoint, with an interval over resampled steps. None
    without the metric.
    """
    figure = best_metric(workspace, spec)
    if figure is not None and spec.keep.best is None:
        return dict(list_evaluations(workspace.metrics(), figure)).get(step)
    values = [
        line[figure]
        for line in workspace.metrics()
        if step - spec.save_every < line["step"] <= step and figure in line
    ]
    return bootstrap_problems(values, seed=workspace.job.seed, resamples=2000) if values else None


def best_step(workspace: Workspace, spec: TrainingSpec, steps: Sequence[int]) -> int | None:
    """Return the best of the steps by `best_metric`, the earlier of equals; None without the metric."""
    figure = best_metric(workspace, spec)
    if figure is None:
        return None
    sign = 1 if figure.endswith(LOWER_IS_BETTER) else -1
    means = [(sign * mean.mean, step) for step in steps if (mean := metric_at(workspace, spec, step))]
    return min(means)[1] if means else None


def check_best_metric(workspace: Workspace, name: str) -> None:
    """Check that a step of the stage has the metric `keep.best`.

    Raises:
        RequestError: when no step has the metric.
    """
    names = {key for line in workspace.metrics() for key in line} - {"step"}
    if name not in names:
        raise RequestError(
            f"no step so far has a metric {name!r}", where="keep.best", remedy=did_you_mean(name, names)
        )


def best_summary(workspace: Workspace, spec: TrainingSpec, steps: int) -> dict[str, Any]:
    """Return `best`: the metric, with its intervals at the best and the last step.

    If the intervals overlap, the best checkpoint may be no better than the last.

    Args:
        steps: the last step.

    Returns:
        empty without `best_metric`.
    """
    figure = best_metric(workspace, spec)
    if figure is None:
        return {}
    step = best_step(workspace, spec, [*saved_steps(workspace), steps])
    last = metric_at(workspace, spec, steps)
    best = None if step is None else metric_at(workspace, spec, step)
    is_final = step == steps or outputs_best(spec)
    return {
        "best": {
            "figure": figure,
            "step": step,
            "interval": best and best._asdict(),
            "last": last and last._asdict(),
            "checkpoint": None if step is None else FINAL if is_final else BEST,
        }
    }


def outputs_best(spec: TrainingSpec) -> bool:
    """Return whether the final checkpoint is the best one and not the last."""
    evaluation = getattr(spec, "eval", None)
    return evaluation is not None and evaluation.output == "best"


def describe_retention(spec: TrainingSpec, memory: MemoryPlan) -> str:
    """Return the line of a stage's plan about checkpoints: which it keeps, and the most disk space they take.

    A checkpoint holds the weights and AdamW's two moments. While a checkpoint is written, it exists in
    addition to the kept ones.
    """
    size = memory.persistent.get("weights", 0) + memory.persistent.get("moments", 0)
    kept = f"the newest {spec.keep.last}" if spec.keep.last > 1 else "the newest"
    best = f" and the best by {spec.keep.best}" if spec.keep.best else ""
    best = best or (" and the best evaluated" if getattr(spec, "eval", None) else "")
    total = (spec.keep.last + 1 + (2 if best else 0)) * size
    return f"every {plural(spec.save_every, 'step')}; {kept}{best} kept, about {total / 1e6:,.0f} MB at most"


def checkpoint_bytes(workspace: Workspace, exclude: Path | None = None) -> int:
    """Return the size in bytes of all checkpoints on disk, without the directory `exclude`."""
    return sum(
        path.stat().st_size
        for path in workspace.checkpoints.rglob("*")
        if path.is_file() and (exclude is None or exclude not in path.parents)
    )
