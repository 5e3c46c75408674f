"""What sft and rl share around their loops: resuming, saving, and the checkpoint at the end."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perilune.bundle.workspace import Workspace
from perilune.files import fsync_directory
from perilune.learn.checkpoints import is_complete, latest_complete
from perilune.learn.trainer import Learner
from perilune.models.decoder import Decoder
from perilune.models.loading import save_checkpoint
from perilune.models.tokenizer import Tokenizer
from perilune.tasks.session import Policy
from perilune.watchdog import Waiting

FINAL = "final"
OPTIMIZER = "optimizer"  # beside the final weights: the learner's state, for a stage that carries it on


def resume(workspace: Workspace, learner: Learner) -> int:
    """Continue from the last complete checkpoint of an earlier attempt; return the step to start at.

    What was being written when it died is removed.
    """
    for unfinished in workspace.checkpoints.glob(".*"):
        shutil.rmtree(unfinished)
    final = workspace.checkpoints / FINAL
    directory = latest_complete(workspace.checkpoints)
    if is_complete(final / OPTIMIZER):  # all steps are done, and only the summary is missing
        directory = final / OPTIMIZER
    elif final.exists():
        shutil.rmtree(final)
    if directory is None:
        workspace.rewind(0)
        return 0
    step = int(learner.load_state(directory)["step"])
    workspace.rewind(step)
    workspace.event("resumed", step=step)
    workspace.log(f"resumed from step {step}")
    return step


def save(workspace: Workspace, learner: Learner, step: int, keep: int = 1) -> None:
    """Write a checkpoint to resume from, and drop the older ones."""
    directory = workspace.checkpoints / f"step-{step:06d}"
    with Waiting("checkpoint"):
        learner.save_state(directory, {"step": step})
    workspace.event("checkpoint", step=step)
    for old in sorted(workspace.checkpoints.glob("step-*"))[:-keep]:
        shutil.rmtree(old)


def finish(
    workspace: Workspace,
    policy: Policy,
    learner: Learner,
    steps: int,
    write: Callable[[Path, Decoder, Tokenizer], None] = save_checkpoint,
) -> dict[str, Any]:
    """Write the final checkpoint (Hugging Face format, the optimizer's state beside it)."""
    final = workspace.checkpoints / FINAL
    if not final.exists():
        partial = workspace.checkpoints / ".final.partial"
        with Waiting("final checkpoint"):
            write(partial, policy.decoder, policy.tokenizer)
            learner.save_state(partial / OPTIMIZER, {"step": steps})
        partial.rename(final)
        fsync_directory(workspace.checkpoints)
    for old in workspace.checkpoints.glob("step-*"):
        shutil.rmtree(old)
    parameters = sum(parameter.numel() for parameter in policy.decoder.parameters())
    return {"kind": "training", "steps": steps, "parameters": parameters}


def first_and_last(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Means of the named figures over the first and the last few steps, and the tokens learned from.

    Args:
        lines: as `Workspace.metrics` gives them.
    """
    edge = max(1, min(5, len(lines) // 2))

    def means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {name: math.fsum(row[name] for row in rows) / len(rows) for name in names}

    return {
        "first": means(lines[:edge]),
        "last": means(lines[-edge:]),
        "tokens": int(sum(line["tokens"] for line in lines)),
    }


def carry_optimizer(workspace: Workspace, learner: Learner) -> bool:
    """Start from the second moments the stage before left beside its weights; False when none."""
    if not workspace.has_input("checkpoint"):
        return False
    state = workspace.input("checkpoint") / OPTIMIZER
    if not state.is_dir():
        return False
    learner.carry_second_moments(state)
    return True
