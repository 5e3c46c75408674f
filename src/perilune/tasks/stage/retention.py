"""Which checkpoints of a stage stay: the newest, and the best by a figure that the stage writes."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from perilune.bundle.job import Frozen

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace
    from perilune.metrics.bootstrap import Interval
    from perilune.models.memory import MemoryPlan

STEP = "step-"
FINAL = "final"
BEST = "best"
LOWER_IS_BETTER = ("loss", "nll")  # what the names of such figures end in


class Keep(Frozen):
    """The checkpoints that stay."""

    last: int = Field(1, ge=1, description="so many of the newest stay, the final one among them")
    best: str | None = Field(
        None, description="figure by which the best stays too: highest, or lowest of a loss or an nll"
    )
    optimizer: bool = Field(
        False, description="the optimizer's state stays beside the final weights, for restore_optimizer"
    )


class Saving(Frozen):
    """Fields of every stage that learns."""

    steps: int
    save_every: int = Field(20, ge=1, description="steps between two checkpoints to resume from")
    keep: Keep = Field(Keep(), description="which of them stay")


def step_directory(workspace: Workspace, step: int) -> Path:
    """Where the checkpoint after so many steps lies."""
    return workspace.checkpoints / f"{STEP}{step:06d}"


def saved_steps(workspace: Workspace) -> list[int]:
    """Steps after which there is a checkpoint, in order."""
    return sorted(int(path.name.removeprefix(STEP)) for path in workspace.checkpoints.glob(f"{STEP}*"))


def forget(directory: Path) -> None:
    """Remove a checkpoint. Killed in the middle, it leaves a name that nothing takes for one."""
    hidden = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.old")
    directory.rename(hidden)
    shutil.rmtree(hidden)


def prune(workspace: Workspace, spec: Saving, *, beside: int = 0) -> None:
    """Remove all checkpoints of steps but those that the spec keeps; `beside`: how many stay elsewhere."""
    steps = saved_steps(workspace)
    newest = steps[max(0, len(steps) - max(0, spec.keep.last - beside)) :]
    best = best_step(workspace, spec, steps)
    for step in steps:
        if step not in newest and step != best:
            forget(step_directory(workspace, step))


def figure_of(workspace: Workspace, spec: Saving, step: int) -> Interval | None:
    """The mean of the figure that decides, over the steps that led to a checkpoint, with its interval.

    Those steps are the last `save_every`; they are resampled. None when none of them has the figure.
    """
    from perilune.metrics.bootstrap import bootstrap_problems

    figure = spec.keep.best
    values = [
        line[figure]
        for line in workspace.metrics()
        if step - spec.save_every < line["step"] <= step and figure in line
    ]
    return bootstrap_problems(values, seed=workspace.job.seed, resamples=2000) if values else None


def best_step(workspace: Workspace, spec: Saving, steps: Sequence[int]) -> int | None:
    """Which of the steps stands best, the earlier of equals; None when no figure is asked for, or seen."""
    if spec.keep.best is None:
        return None
    sign = 1 if spec.keep.best.endswith(LOWER_IS_BETTER) else -1
    seen = [(sign * found.mean, step) for step in steps if (found := figure_of(workspace, spec, step))]
    return min(seen)[1] if seen else None


def best_summary(workspace: Workspace, spec: Saving) -> dict[str, Any]:
    """`best`: the figure, the best step and the last one, with their intervals; empty when none is asked for.

    Intervals that overlap say that the best is not surely better than the last.
    """
    if spec.keep.best is None:
        return {}
    step = best_step(workspace, spec, [*saved_steps(workspace), spec.steps])
    last = figure_of(workspace, spec, spec.steps)
    found = None if step is None else figure_of(workspace, spec, step)
    return {
        "best": {
            "figure": spec.keep.best,
            "step": step,
            "interval": found and found._asdict(),
            "last": last and last._asdict(),
            "checkpoint": step and (FINAL if step == spec.steps else BEST),
        }
    }


def planned(spec: Saving, memory: MemoryPlan) -> str:
    """What is kept, and about how much of the disk it takes at most: the plan's line of a stage that learns.

    A checkpoint holds the weights and AdamW's two moments; one more is there while it is written.
    """
    one = memory.persistent.get("weights", 0) + memory.persistent.get("moments", 0)
    kept = f"the newest {spec.keep.last}" if spec.keep.last > 1 else "the newest"
    best = f" and the best by {spec.keep.best}" if spec.keep.best else ""
    most = (spec.keep.last + 1 + (2 if best else 0)) * one
    return f"every {spec.save_every} steps; {kept}{best} kept, about {most / 1e6:,.0f} MB at most"


def disk_bytes(workspace: Workspace, without: Path | None = None) -> int:
    """Bytes of all checkpoints that are there, but for the folder `without`."""
    return sum(
        path.stat().st_size
        for path in workspace.checkpoints.rglob("*")
        if path.is_file() and (without is None or without not in path.parents)
    )
