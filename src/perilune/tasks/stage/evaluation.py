"""Held-out evaluation while a stage trains, with the stage's engine and the learner's current weights.

All random numbers are keyed by (seed, 0, task, sample), as in an evaluate stage. Training counts its steps
from 1, so evaluations do not change its random numbers, and two evaluations differ only by the weights.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from perilune.bundle.job import Job
from perilune.bundle.workspace import Workspace
from perilune.data.episode import Episode
from perilune.engine.engine import Engine
from perilune.engine.request import SamplingParams
from perilune.environments.core.protocol import Task
from perilune.learn.trainer import Learner
from perilune.metrics.bootstrap import Interval, bootstrap_problems
from perilune.metrics.held_out import (
    best_evaluation,
    change_between,
    evaluations_since_best,
    fall_warning,
    gap_warning,
    list_evaluations,
    training_rate,
)
from perilune.metrics.proportion import pass_rate_interval
from perilune.rollout.sub_agents import SubAgents
from perilune.rollout.timing import Stopwatch
from perilune.rollout.worker import RolloutWorker
from perilune.tasks.stage.evaluation_settings import (
    DATA_SET,
    EVAL_PREFIX,
    HELDOUT_SET,
    EvaluatedSpec,
    EvaluationSettings,
    make_evaluated_environment,
)
from perilune.tasks.stage.memory_plan import make_engine
from perilune.tasks.stage.outcomes import evaluation_summary
from perilune.tasks.stage.policy import Policy, heldout_tasks
from perilune.tasks.stage.publishing import Publisher
from perilune.verifiers import Scorer

HeldOutData = Callable[[], Mapping[str, Mapping[str, float]]]
"""Measures the data that a stage holds out; returns values by name ("loss", "accuracy"), then by example."""


@dataclass(frozen=True)
class TaskSet:
    """Held-out tasks of one environment, and the worker that plays them."""

    name: str
    rollouts: RolloutWorker
    tasks: Sequence[Task]


class HeldOutEvaluation:
    """Evaluates the learner's weights on every set, and writes the values of each task or example."""

    def __init__(
        self,
        workspace: Workspace,
        spec: EvaluatedSpec,
        sets: Sequence[TaskSet],
        params: SamplingParams,
        *,
        publisher: Publisher | None,
        data: HeldOutData | None,
    ) -> None:
        assert spec.eval is not None
        self._workspace, self._settings, self._steps, self._sets = workspace, spec.eval, spec.steps, sets
        self._params, self._publisher, self._data = params, publisher, data
        self.seconds = 0.0

    def is_due(self, step: int) -> bool:
        return step % self._settings.every == 0 or step == self._steps

    def measure(self, step: int) -> dict[str, float]:
        """Return the metrics of an evaluation after `step` steps, and set `seconds` to its duration."""
        start = time.perf_counter()
        figures: dict[str, float] = {}
        if self._publisher is not None:
            self._publisher.publish()
        for task_set in self._sets:
            figures |= self._evaluate_set(task_set, step)
        if self._data is not None:
            values = self._data()
            figures |= self._with_intervals(DATA_SET, values)
            self._workspace.evaluation(step, DATA_SET, values)
        self.seconds = time.perf_counter() - start
        return figures

    def _evaluate_set(self, task_set: TaskSet, step: int) -> dict[str, float]:
        groups = task_set.rollouts.play(
            task_set.tasks, samples=self._settings.samples, params=self._params, step=0, watch=Stopwatch()
        )
        seed = self._workspace.job.seed
        summary = evaluation_summary(task_set.rollouts.environment.id, groups, [], seed)
        values = {
            "pass@1": {task: correct / count for task, count, correct in summary["correct_per_task"]},
            "reward": _mean_rewards(groups),
        }
        self._workspace.evaluation(step, task_set.name, values)
        extra = {"length": summary["length"]["mean"], "truncated": summary["truncated"]}
        figures = self._with_intervals(task_set.name, values)
        for part, entry in summary.get("by_environment", {}).items():
            if "pass@1" in entry:  # missing for a part without a scored answer
                name = f"{EVAL_PREFIX}{task_set.name}/environment/{part}/pass@1"
                figures |= Interval(**entry["pass@1"]).figures(name)
        return figures | {f"{EVAL_PREFIX}{task_set.name}/{name}": value for name, value in extra.items()}

    def _with_intervals(self, name: str, values: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        figures: dict[str, float] = {}
        for figure, by_example in values.items():
            mean = pass_rate_interval if figure in ("pass@1", "accuracy") else bootstrap_problems
            interval = mean(list(by_example.values()), seed=self._workspace.job.seed)
            figures |= interval.figures(f"{EVAL_PREFIX}{name}/{figure}")
        return figures


@contextmanager
def open_evaluation(
    workspace: Workspace,
    spec: EvaluatedSpec,
    learner: Learner,
    policy: Policy,
    *,
    rollouts: RolloutWorker | None,
    data: HeldOutData | None,
) -> Iterator[HeldOutEvaluation]:
    """Set up the evaluation of the sets in the stage's `eval` section.

    Args:
        rollouts: the stage's worker, whose engine is used; if it is None, an engine is made.
        data: measures the data that the stage holds out; None if it holds out none.

    Raises:
        RequestError: when an environment has too few held-out tasks, or several players.
    """
    settings = spec.eval
    assert settings is not None
    spec.check_evaluation(workspace.job)
    job, sections = workspace.job, settings.sections(workspace.job.environment)
    publisher, sets = None, []
    with ExitStack() as stack:
        if sections:
            engine = _evaluation_engine(spec, policy, job, rollouts)
            publisher = Publisher(engine, learner)
        for name, section in sections.items():
            if rollouts is not None and section == job.environment:
                scorer = rollouts.scorer
            else:
                scorer = stack.enter_context(Scorer(section))
            environment = make_evaluated_environment(section)
            worker = RolloutWorker(
                engine,
                policy.tokenizer,
                scorer,
                environment,
                job.seed,
                ranks=learner.ranks,
                sub_agents=SubAgents(rollouts.sub_agents.engine if rollouts else None),
            )
            sets.append(TaskSet(name, worker, heldout_tasks(environment, settings.tasks, job.seed)))
        temperature = getattr(spec, "temperature", 1.0)
        params = SamplingParams(spec.evaluation_tokens(job), temperature, policy.stop_token_ids)
        yield HeldOutEvaluation(workspace, spec, sets, params, publisher=publisher, data=data)


def _evaluation_engine(
    spec: EvaluatedSpec, policy: Policy, job: Job, rollouts: RolloutWorker | None
) -> Engine:
    """Return the stage's engine, or a new engine for a stage that doesn't sample."""
    if rollouts is None:
        room = spec.evaluation_memory(job, policy.decoder.config)
        return make_engine(policy.decoder, room["max_tokens"], policy.tokenizer, samples=room["samples"])
    assert isinstance(rollouts.engine, Engine)
    return rollouts.engine


class EvaluationHistory:
    """The results of the evaluations so far, read from the workspace's metrics.

    Attributes:
        figure: the metric of the best checkpoint.
        best: the step of the best evaluation; None before the first.
        latest: the last value of the figure by name, for the progress bar; empty before the first.
    """

    def __init__(self, workspace: Workspace, settings: EvaluationSettings) -> None:
        self._workspace, self._settings = workspace, settings
        self.figure = settings.figure(workspace.job.environment)
        self._read(workspace.metrics())

    def _read(self, lines: Sequence[Mapping[str, Any]]) -> None:
        evaluations = list_evaluations(lines, self.figure)
        self.best = best_evaluation(lines, self.figure)
        self.latest = {self.figure.removeprefix(EVAL_PREFIX): evaluations[-1][1].mean} if evaluations else {}

    def observe(self, step: int) -> bool:
        """Log the recorded evaluation of `step`, and a warning when a gap to training appears.

        Returns:
            whether `stop_after` ends the stage.
        """
        lines = self._workspace.metrics()
        self._read(lines)
        texts = [
            f"{name}: {figure} {evaluations[-1][1]:{'.1%' if figure == 'pass@1' else '.4g'}}"
            for name, figure in self._set_figures(lines)
            if (evaluations := list_evaluations(lines, f"{EVAL_PREFIX}{name}/{figure}"))
        ]
        self._workspace.log(f"step {step}: held out: {'; '.join(texts)}")
        warning, before = (
            self._gap_warning(lines),
            self._gap_warning([line for line in lines if line["step"] < step]),
        )
        if warning and not before:
            self._workspace.log(f"warning: step {step}: {warning}")
            self._workspace.event("held_out_gap", step=step)
        since, patience = evaluations_since_best(lines, self.figure), self._settings.stop_after
        if patience is None or since < patience:
            return False
        self._workspace.log(f"step {step}: stopped: {self._stop_reason(since)}")
        self._workspace.event("stopped_early", step=step)
        return True

    def summary(self, steps: int, planned: int) -> dict[str, Any]:
        """Return the curves of evaluation and training, the change since the start, and warnings.

        Args:
            steps: the steps of this run.
            planned: the steps of the spec, more than `steps` if the run was stopped early.
        """
        lines, values = self._workspace.metrics(), self._workspace.evaluations()
        changes: dict[str, Any] = {}
        warnings = [warning for warning in [self._gap_warning(lines)] if warning]
        for name, figure in self._set_figures(lines):
            change = change_between(
                values, name, figure, before=0, after=steps, seed=self._workspace.job.seed
            )
            changes[name] = {"figure": figure, "change": change and change._asdict()}
            if warning := fall_warning(name, figure, change):
                warnings.append(warning)
                self._workspace.log(f"warning: {warning}")
        since = evaluations_since_best(lines, self.figure)
        return {
            "figure": self.figure,
            "best": self.best,
            "output": self._settings.output,
            "curve": self._curve(lines),
            "sets": changes,
            "stopped": self._stop_reason(since) if steps < planned else None,
            "warnings": warnings,
        }

    def _stop_reason(self, since: int) -> str:
        figure = self.figure.removeprefix(EVAL_PREFIX)
        return f"{since} evaluations in a row were not better than that of step {self.best} by {figure}"

    def _set_figures(self, lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        names = [*self._settings.sections(self._workspace.job.environment)]
        figures = [(name, "pass@1") for name in names]
        if any(f"{EVAL_PREFIX}{DATA_SET}/loss" in line for line in lines[:1]):
            figures.append((DATA_SET, "loss"))
        return figures

    def _gap_warning(self, lines: Sequence[Mapping[str, Any]]) -> str:
        return gap_warning(lines, f"{EVAL_PREFIX}{HELDOUT_SET}/pass@1", self._settings.tasks)

    def _curve(self, lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        curve: list[dict[str, Any]] = []
        for step, _ in list_evaluations(lines, self.figure):
            before = curve[-1]["step"] if curve else step
            row: dict[str, Any] = {
                "step": step,
                "training": _interval_json(training_rate(lines, before, step)),
            }
            for name, figure in self._set_figures(lines):
                values = dict(list_evaluations(lines, f"{EVAL_PREFIX}{name}/{figure}"))
                row[name] = _interval_json(values.get(step))
            curve.append(row)
        return curve


def _interval_json(interval: Interval | None) -> dict[str, float] | None:
    return interval and interval._asdict()


def _mean_rewards(groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
    """Return the mean reward of each task's scored answers."""
    rewards = {
        group[0].task_id: [episode.reward for episode in group if episode.reward is not None]
        for group in groups
    }
    return {task: sum(values) / len(values) for task, values in rewards.items() if values}
