"""The training loop of every stage: it calls `step`, and resumes, times, evaluates, records and saves."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from perilune.bundle.remote.runner import OPTIMIZER  # the folder of the learner's state in a checkpoint
from perilune.bundle.workspace import Workspace
from perilune.errors import PeriluneError, WorkFailedError
from perilune.files import fsync_directory
from perilune.learn.adaptation import trainable
from perilune.learn.checkpoints import find_latest_complete, is_complete
from perilune.learn.distributed import Ranks
from perilune.learn.trainer import Learner
from perilune.models.adapters.files import save_policy
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.timing import Stopwatch
from perilune.rollout.worker import RolloutWorker
from perilune.tasks.forgetting.settings import ForgettingSettings
from perilune.tasks.stage.evaluation import EvaluationHistory, HeldOutData, HeldOutEvaluation, open_evaluation
from perilune.tasks.stage.evaluation_settings import EvaluatedSpec
from perilune.tasks.stage.policy import Policy
from perilune.tasks.stage.retention import (
    BEST,
    FINAL,
    TrainingSpec,
    best_step,
    best_summary,
    check_best_metric,
    checkpoint_bytes,
    missing_optimizer_error,
    outputs_best,
    prune_checkpoints,
    remove_checkpoint,
    saved_steps,
    step_directory,
)
from perilune.watchdog import Watchdog


class Resumable(Protocol):
    """A learner whose state can be saved and loaded."""

    ranks: Ranks

    def save_state(self, directory: Path, extra: Mapping[str, Any] | None = None) -> None: ...

    def load_state(self, directory: Path) -> dict[str, Any]: ...


@dataclass(frozen=True)
class StepReport:
    """The result of one step.

    Attributes:
        metrics: reproducible figures, for metrics.jsonl.
        progress: figures shown with the progress bar.
        timing: wall-clock figures besides those of the stopwatch, for timings.jsonl.
        failure: an error that stops the stage after the step has been recorded.
    """

    metrics: Mapping[str, Any]
    progress: Mapping[str, float] = field(default_factory=dict)
    timing: Mapping[str, float] = field(default_factory=dict)
    failure: WorkFailedError | None = None


class TrainingLoop:
    """Runs the steps of a stage from the last checkpoint to the final one, and the evaluations between them.

    Create it after the learner and before anything reads the workspace's metrics: it restores the learner
    from the last checkpoint of an earlier attempt, and removes the metrics of later steps.

    Args:
        policy: the policy that is trained, for evaluations.
        rollouts: the stage's worker, whose engine evaluations use; if it is None, they make an engine.
        held_out: measures the data that the stage holds out; None if it holds out none.

    Attributes:
        completed_steps: number of steps that earlier attempts completed.
    """

    def __init__(
        self,
        workspace: Workspace,
        learner: Resumable,
        spec: TrainingSpec,
        policy: Policy | None = None,
        *,
        rollouts: RolloutWorker | None = None,
        held_out: HeldOutData | None = None,
    ) -> None:
        self._workspace, self._learner, self._spec = workspace, learner, spec
        self._policy, self._rollouts, self._held_out = policy, rollouts, held_out
        self._watch = Stopwatch()
        if isinstance(learner, Learner) and getattr(spec, "restore_optimizer", False):
            _restore_optimizer(workspace, learner)
        self.completed_steps = resume(workspace, learner)
        self._history: EvaluationHistory | None = None
        if isinstance(spec, EvaluatedSpec) and spec.eval is not None:
            self._history = EvaluationHistory(workspace, spec.eval)

    def run(
        self,
        step: Callable[[int, Stopwatch], StepReport | None],
        before_save: Callable[[], None] = lambda: None,
    ) -> None:
        """Run the remaining steps and record their reports.

        Args:
            step: runs one step, given the number of completed steps and a new stopwatch; returns None to end
                the loop early.
            before_save: called before each checkpoint.

        Raises:
            WorkFailedError: the failure that a step reports.
        """
        workspace, spec = self._workspace, self._spec
        self._before_save = before_save
        with self._open_evaluation() as evaluation:
            if evaluation is not None and self.completed_steps == 0:
                self._evaluate_start(evaluation)
            for done in range(self.completed_steps, spec.steps):
                watch = Stopwatch()
                report = step(done, watch)
                if report is None:
                    return
                timing = {**watch.figures(), **report.timing}
                held_out: dict[str, float] = {}
                if evaluation is not None and evaluation.is_due(done + 1) and report.failure is None:
                    held_out = evaluation.measure(done + 1)
                    timing["evaluation"] = evaluation.seconds
                workspace.metric(done + 1, **report.metrics, **held_out)
                workspace.timing(done + 1, **timing)
                stopped = bool(held_out) and self._history is not None and self._history.observe(done + 1)
                latest = {} if self._history is None else self._history.latest
                workspace.progress(done + 1, spec.steps, "steps", **report.progress, **latest)
                if report.failure is not None:
                    raise report.failure
                if stopped:
                    return
                self._save_when_due(done + 1)

    def _open_evaluation(self) -> AbstractContextManager[HeldOutEvaluation | None]:
        spec, learner = self._spec, self._learner
        if self._history is None or self.completed_steps >= spec.steps:
            return nullcontext()
        assert isinstance(spec, EvaluatedSpec) and isinstance(learner, Learner) and self._policy is not None
        return open_evaluation(
            self._workspace, spec, learner, self._policy, rollouts=self._rollouts, data=self._held_out
        )

    def _evaluate_start(self, evaluation: HeldOutEvaluation) -> None:
        """Evaluate the policy before the first step, as step 0."""
        assert self._history is not None
        self._workspace.rewind(-1)
        self._workspace.metric(0, **evaluation.measure(0))
        self._history.observe(0)
        self._save_when_due(0)

    def _save_when_due(self, step: int) -> None:
        """Write a checkpoint after every `save_every` steps and every best evaluation, and prune older ones.

        After the last step, `finish` writes the final checkpoint instead.
        """
        workspace, spec = self._workspace, self._spec
        is_due = step > 0 and step % spec.save_every == 0
        is_best = self._history is not None and self._history.best == step
        if step >= spec.steps or not (is_due or is_best):
            return
        with Watchdog("checkpoint"):
            self._before_save()
            self._learner.save_state(step_directory(workspace, step), {"step": step})
        if not workspace.leads:
            return
        prune_checkpoints(workspace, spec)
        disk_bytes = checkpoint_bytes(workspace)
        workspace.event("checkpoint", step=step, disk_bytes=disk_bytes)
        workspace.log(f"checkpoint of step {step}; all checkpoints take {disk_bytes / 1e6:,.1f} MB")
        if spec.keep.best and best_step(workspace, spec, [step]) is None:
            check_best_metric(workspace, spec.keep.best)
            workspace.log(f"keep.best: the last {spec.save_every} steps have no metric {spec.keep.best!r}")

    def finish(
        self, policy: Policy, write: Callable[[Path, Decoder, Tokenizer], None] = save_policy
    ) -> dict[str, Any]:
        """Write the final checkpoint in Hugging Face format, and the best one; do not train afterwards.

        The learner's state stays beside the final weights until the stage's summary is written, so that a
        killed attempt can resume there; `keep.optimizer` keeps it permanently. After the best checkpoint is
        written, the learner and the policy have its weights.

        Args:
            write: writes the final weights.

        Returns:
            the first entries of a training summary; only "seconds" in processes other than the first.
        """
        assert isinstance(self._learner, Learner)
        finished = _write_results(self._workspace, policy, self._learner, self._spec, write)
        if self._history is not None and self._workspace.leads:
            finished["held_out"] = self._history.summary(finished["steps"], self._spec.steps)
        return finished | self._measure_forgetting(policy) | {"seconds": self._watch.elapsed}

    def _measure_forgetting(self, policy: Policy) -> dict[str, Any]:
        """Measure forgetting if the recipe asks for it. A failed measurement does not fail the stage."""
        workspace = self._workspace
        settings = getattr(self._spec, "forgetting", False)
        start = workspace.starting_checkpoint()
        if start is None or not (isinstance(settings, ForgettingSettings) and workspace.leads):
            return {}
        from perilune.tasks.forgetting.measure import measure_forgetting

        device = next(policy.decoder.parameters()).device
        try:
            result = measure_forgetting(workspace, settings, start, workspace.checkpoints / FINAL, device)
        except PeriluneError as error:
            workspace.log(f"warning: forgetting was not measured: {error}")
            result = {"skipped": str(error)}
        return {"forgetting": result}


def resume(workspace: Workspace, learner: Resumable) -> int:
    """Load the last complete checkpoint of an earlier attempt; return its number of steps.

    Removes incomplete and damaged checkpoints, and the metrics of later steps.
    """
    directory = _find_resume_checkpoint(workspace) if workspace.leads else None
    name = learner.ranks.broadcast("checkpoint to resume", "" if directory is None else str(directory))
    step = int(learner.load_state(Path(name))["step"]) if name else 0
    if workspace.leads:
        for later in saved_steps(workspace):  # damaged checkpoints
            if later > step:
                remove_checkpoint(step_directory(workspace, later))
    workspace.rewind(step)
    if name:
        workspace.event("resumed", step=step)
        workspace.log(f"resumed from step {step}")
    return step


def _find_resume_checkpoint(workspace: Workspace) -> Path | None:
    for unfinished in workspace.checkpoints.glob(".*"):
        shutil.rmtree(unfinished)
    final = workspace.checkpoints / FINAL
    if is_complete(final / OPTIMIZER):  # all steps are done, and only the summary is missing
        return final / OPTIMIZER
    directory = find_latest_complete(workspace.checkpoints)
    for stale in (final, workspace.checkpoints / BEST):
        if stale.exists():
            remove_checkpoint(stale)
    return directory


def write_final_checkpoint(
    workspace: Workspace, learner: Resumable, steps: int, write: Callable[[Path], None]
) -> None:
    """Write the final checkpoint and the learner's state beside it, unless an earlier attempt did.

    Args:
        steps: the steps of the spec, which the learner's state records.
        write: writes the weights to a new directory.
    """
    if (workspace.checkpoints / FINAL).exists():
        return
    partial = workspace.checkpoints / f".{FINAL}.partial"
    if workspace.leads:
        write(partial)
    learner.save_state(partial / OPTIMIZER, {"step": steps})
    if workspace.leads:
        _commit(partial, workspace.checkpoints / FINAL)


def _write_results(
    workspace: Workspace,
    policy: Policy,
    learner: Learner,
    spec: TrainingSpec,
    write: Callable[[Path, Decoder, Tokenizer], None],
) -> dict[str, Any]:
    state = workspace.checkpoints / FINAL / OPTIMIZER
    last = _last_step(workspace, spec)

    def write_policy(directory: Path) -> None:
        write(directory, policy.decoder, policy.tokenizer)

    with Watchdog("final checkpoint"):
        best = best_step(workspace, spec, [*saved_steps(workspace), last]) if workspace.leads else None
        if best == last or (workspace.checkpoints / BEST).exists():
            best = None
        learner.ranks.check_same("last version", str(learner.version))
        chosen = learner.ranks.broadcast("best step", "" if best is None else str(best))
        if not (workspace.leads or learner.ranks.sharded):  # another machine, perhaps without checkpoints
            chosen = ""
        if chosen and outputs_best(spec):
            learner.load_state(step_directory(workspace, int(chosen)))
        write_final_checkpoint(workspace, learner, spec.steps, write_policy)
        if chosen and not outputs_best(spec):
            learner.load_state(step_directory(workspace, int(chosen)))
        if best is not None and not outputs_best(spec):
            partial = workspace.checkpoints / f".{BEST}.partial"
            write_policy(partial)
            _commit(partial, workspace.checkpoints / BEST)
    if not workspace.leads:
        return {}
    prune_checkpoints(workspace, spec, saved_elsewhere=1)
    dropped = None if spec.keep.optimizer else state
    if dropped is not None:
        workspace.delete_at_end(dropped)
    chosen_best = best_summary(workspace, spec, last)
    if spec.keep.best and chosen_best["best"]["step"] is None:
        workspace.log(f"keep.best: no step has a metric {spec.keep.best!r}; no best checkpoint was kept")
    parameters = sum(parameter.numel() for parameter in policy.decoder.parameters())
    return {
        "kind": "training",
        "steps": last,
        "parameters": parameters,
        "trained_parameters": sum(parameter.numel() for parameter in trainable(policy.decoder).values()),
        "disk_bytes": checkpoint_bytes(workspace, dropped),
        **chosen_best,
    }


def _last_step(workspace: Workspace, spec: TrainingSpec) -> int:
    """Return the last step: the stage may have ended before `steps`."""
    lines = workspace.metrics()
    return int(lines[-1]["step"]) if lines else spec.steps


def _commit(partial: Path, target: Path) -> None:
    """Rename a complete directory to its final name, durably."""
    partial.rename(target)
    fsync_directory(target.parent)


def mean_first_and_last(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return means of the named metrics over the first and last steps, and the number of trained tokens.

    Args:
        lines: the lines of `Workspace.step_metrics`.
    """
    edge = max(1, min(5, len(lines) // 2))

    def means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {name: fmean(row[name] for row in rows) for name in names}

    return {
        "first": means(lines[:edge]),
        "last": means(lines[-edge:]),
        "tokens": int(sum(line["tokens"] for line in lines)),
    }


def _restore_optimizer(workspace: Workspace, learner: Learner) -> None:
    """Load the second moments from the optimizer state of the stage's checkpoint.

    Raises:
        RequestError: when the checkpoint has no optimizer state, or that of other parameters.
    """
    state = workspace.input("checkpoint") / OPTIMIZER if workspace.has_input("checkpoint") else None
    if state is None or not state.is_dir():
        raise missing_optimizer_error()
    learner.restore_second_moments(state)
    workspace.log("second moments restored: the first steps depend on the scale of the earlier loss")
