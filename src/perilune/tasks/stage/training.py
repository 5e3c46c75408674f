"""The loop of every stage that trains: it resumes, times, records, saves and finishes around the step."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from perilune.bundle.workspace import Workspace
from perilune.errors import RequestError, WorkFailedError
from perilune.files import fsync_directory
from perilune.learn.adaptation import trainable
from perilune.learn.checkpoints import is_complete, latest_complete
from perilune.learn.distributed import Ranks
from perilune.learn.trainer import Learner
from perilune.models.adapters.files import save_policy
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.timing import Stopwatch
from perilune.tasks.stage.policy import Policy
from perilune.tasks.stage.retention import (
    BEST,
    FINAL,
    Saving,
    best_step,
    best_summary,
    disk_bytes,
    forget,
    prune,
    saved_steps,
    step_directory,
)
from perilune.watchdog import Waiting

OPTIMIZER = "optimizer"  # beside the final weights: the learner's state


class Resumable(Protocol):
    """A learner whose state can be saved and loaded."""

    ranks: Ranks

    def save_state(self, directory: Path, extra: Mapping[str, Any] | None = None) -> None: ...

    def load_state(self, directory: Path) -> dict[str, Any]: ...


@dataclass(frozen=True)
class StepReport:
    """The outcome of one step.

    Attributes:
        metrics: reproducible figures, for metrics.jsonl.
        progress: figures beside the progress bar.
        timing: wall-clock figures beside those of the stopwatch, for timings.jsonl.
        failure: stops the stage, once the step has been recorded.
    """

    metrics: Mapping[str, Any]
    progress: Mapping[str, float] = field(default_factory=dict)
    timing: Mapping[str, float] = field(default_factory=dict)
    failure: WorkFailedError | None = None


class TrainingLoop:
    """Runs the steps of a stage from the last checkpoint to the final one.

    Make it when the learner is complete and before anything reads the workspace's metrics: it restores the
    learner from the last checkpoint of an earlier attempt, and removes what that attempt recorded after it.

    Attributes:
        first: steps that are already done.
    """

    def __init__(self, workspace: Workspace, learner: Resumable, spec: Saving) -> None:
        self._workspace, self._learner, self._spec = workspace, learner, spec
        self._watch = Stopwatch()
        if isinstance(learner, Learner) and getattr(spec, "restore_optimizer", False):
            _restore_optimizer(workspace, learner)
        self.first = resume(workspace, learner)

    def run(self, step: Callable[[int, Stopwatch], StepReport | None]) -> None:
        """Call `step` with the number of steps done and a fresh stopwatch, and record its report.

        Args:
            step: returns None to end the loop early.

        Raises:
            WorkFailedError: the failure that a step reports.
        """
        workspace, spec = self._workspace, self._spec
        for done in range(self.first, spec.steps):
            watch = Stopwatch()
            report = step(done, watch)
            if report is None:
                return
            workspace.metric(done + 1, **report.metrics)
            workspace.timing(done + 1, **{**watch.figures(), **report.timing})
            workspace.progress(done + 1, spec.steps, "steps", **report.progress)
            if report.failure is not None:
                raise report.failure
            self._save_when_due(done + 1)

    def _save_when_due(self, step: int) -> None:
        """After every `save_every` steps but the last, write a checkpoint and remove older ones."""
        workspace, spec = self._workspace, self._spec
        if step % spec.save_every or step >= spec.steps:
            return
        with Waiting("checkpoint"):
            self._learner.save_state(step_directory(workspace, step), {"step": step})
        if not workspace.leads:
            return
        prune(workspace, spec)
        held = disk_bytes(workspace)
        workspace.event("checkpoint", step=step, disk_bytes=held)
        workspace.log(f"checkpoint of step {step}; all checkpoints take {held / 1e6:,.1f} MB")
        if spec.keep.best and best_step(workspace, spec, [step]) is None:
            workspace.log(f"keep.best: the last {spec.save_every} steps have no figure {spec.keep.best!r}")

    def finish(
        self, policy: Policy, write: Callable[[Path, Decoder, Tokenizer], None] = save_policy
    ) -> dict[str, Any]:
        """Write the final checkpoint in Hugging Face format, and the best one; nothing may train after this.

        The learner's state lies beside the final weights until the stage's summary is written, so that a kill
        costs nothing; `keep.optimizer` keeps it for good. To write the best checkpoint, learner and policy
        load it.

        Returns:
            the first entries of a training summary; only "seconds" where another process leads.
        """
        assert isinstance(self._learner, Learner)
        return _finish(self._workspace, policy, self._learner, self._spec, write) | {
            "seconds": self._watch.elapsed
        }


def resume(workspace: Workspace, learner: Resumable) -> int:
    """Load the last complete checkpoint of an earlier attempt; return the number of steps done.

    Incomplete and damaged checkpoints are removed, and so are the metrics of later steps.
    """
    found = _checkpoint_to_resume(workspace) if workspace.leads else None
    name = learner.ranks.broadcast("checkpoint to resume", "" if found is None else str(found))
    step = int(learner.load_state(Path(name))["step"]) if name else 0
    if workspace.leads:
        for later in saved_steps(workspace):  # damaged ones
            if later > step:
                forget(step_directory(workspace, later))
    workspace.rewind(step)
    if name:
        workspace.event("resumed", step=step)
        workspace.log(f"resumed from step {step}")
    return step


def _checkpoint_to_resume(workspace: Workspace) -> Path | None:
    for unfinished in workspace.checkpoints.glob(".*"):
        shutil.rmtree(unfinished)
    final = workspace.checkpoints / FINAL
    if is_complete(final / OPTIMIZER):  # all steps are done, and only the summary is missing
        return final / OPTIMIZER
    directory = latest_complete(workspace.checkpoints)
    for made in (final, workspace.checkpoints / BEST):
        if made.exists():
            forget(made)
    return directory


def _finish(
    workspace: Workspace,
    policy: Policy,
    learner: Learner,
    spec: Saving,
    write: Callable[[Path, Decoder, Tokenizer], None],
) -> dict[str, Any]:
    state = workspace.checkpoints / FINAL / OPTIMIZER
    with Waiting("final checkpoint"):
        if not (workspace.checkpoints / FINAL).exists():
            partial = workspace.checkpoints / f".{FINAL}.partial"
            if workspace.leads:
                write(partial, policy.decoder, policy.tokenizer)
            learner.save_state(partial / OPTIMIZER, {"step": spec.steps})
            if workspace.leads:
                put_in_place(partial, workspace.checkpoints / FINAL)
        best = best_step(workspace, spec, [*saved_steps(workspace), spec.steps]) if workspace.leads else None
        if best == spec.steps or (workspace.checkpoints / BEST).exists():
            best = None
        chosen = learner.ranks.broadcast("best step", "" if best is None else str(best))
        if chosen:
            learner.load_state(step_directory(workspace, int(chosen)))
        if best is not None:
            partial = workspace.checkpoints / f".{BEST}.partial"
            write(partial, policy.decoder, policy.tokenizer)
            put_in_place(partial, workspace.checkpoints / BEST)
    learner.ranks.check_same("last version", str(learner.version))
    if not workspace.leads:
        return {}
    prune(workspace, spec, beside=1)
    dropped = None if spec.keep.optimizer else state
    if dropped is not None:
        workspace.delete_at_end(dropped)
    chosen_best = best_summary(workspace, spec)
    if chosen_best and chosen_best["best"]["step"] is None:
        workspace.log(f"keep.best: no step has a figure {spec.keep.best!r}; no best checkpoint was kept")
    parameters = sum(parameter.numel() for parameter in policy.decoder.parameters())
    return {
        "kind": "training",
        "steps": spec.steps,
        "parameters": parameters,
        "trained_parameters": sum(one.numel() for one in trainable(policy.decoder).values()),
        "disk_bytes": disk_bytes(workspace, dropped),
        **chosen_best,
    }


def put_in_place(partial: Path, whole: Path) -> None:
    """Rename a complete directory to its final name, durably."""
    partial.rename(whole)
    fsync_directory(whole.parent)


def first_and_last(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Means of the named figures over the first and the last steps, and the number of tokens learned from.

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


def _restore_optimizer(workspace: Workspace, learner: Learner) -> None:
    """Load the second moments stored beside the weights of the stage's checkpoint.

    Raises:
        RequestError: when the checkpoint has no optimizer state, or one of other parameters.
    """
    state = workspace.input("checkpoint") / OPTIMIZER if workspace.has_input("checkpoint") else None
    if state is None or not state.is_dir():
        raise RequestError(
            "the model that this stage starts from has no optimizer state",
            where="restore_optimizer",
            remedy="set keep: {optimizer: true} in the stage that trains it, or drop restore_optimizer",
        )
    learner.restore_second_moments(state)
    workspace.log("second moments restored: the first steps depend on the scale of the earlier loss")
