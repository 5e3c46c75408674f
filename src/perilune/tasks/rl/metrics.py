"""Records the metrics and episodes of each RL step, and stops a run without signal."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from types import MappingProxyType
from typing import Any

from perilune.bundle.workspace import Workspace
from perilune.data.episode import Episode
from perilune.data.episodes_file import read_episodes, write_episodes
from perilune.errors import WorkFailedError
from perilune.learn.algorithms import Algorithm
from perilune.learn.objective import objective_curve
from perilune.learn.weights import WeightedGroup, step_figures
from perilune.metrics.length_dynamics import length_dynamics
from perilune.rollout.timing import Stopwatch
from perilune.tasks.checks.answer_form import FormWatch
from perilune.tasks.checks.collapse import CollapseWatch, lasting_reward
from perilune.tasks.checks.gold_watch import GoldWatch
from perilune.tasks.checks.little_learned import little_learned_warning
from perilune.tasks.rl.curriculum import uniform_metrics
from perilune.tasks.stage.custom_metrics import CustomMetrics
from perilune.tasks.stage.outcomes import environment_figures, outcome_figures
from perilune.tasks.stage.training import StepReport, mean_first_and_last

MAX_DEAD_SHARE = 0.95  # share of dead groups (all rewards equal) above which a step has no signal
MAX_DEAD_STEPS = 20  # consecutive steps without signal after which the run stops


class StepRecorder:
    """Computes the metrics of each step, writes its episodes, and stops a run without signal.

    Create it after `TrainingLoop`: it reads the metrics of earlier attempts. Pass rates and rewards are means
    over all scored episodes of players, including those of dead groups.

    Args:
        stop_without_signal: stop after `MAX_DEAD_STEPS` steps in which nearly all groups were dead, and watch
            for a collapse of the reward. False in self-play, where the reward depends on the opponents.
    """

    def __init__(
        self,
        workspace: Workspace,
        gold: GoldWatch,
        custom: CustomMetrics,
        *,
        stop_without_signal: bool = True,
    ) -> None:
        self._workspace, self._custom = workspace, custom
        self._stop_without_signal = stop_without_signal
        self._gold = gold
        self._dead_in_a_row = 0
        self._collapse = CollapseWatch()
        self._form = FormWatch(workspace)
        for line in workspace.step_metrics():
            self._count_dead(line["dead_groups"])
            if stop_without_signal:
                self._collapse.observe(line["step"], lasting_reward(line), line["dead_groups"])
            self._form.observe(line)

    def record(
        self,
        step: int,
        groups: Sequence[WeightedGroup],
        metrics: Mapping[str, float],
        watch: Stopwatch,
        timings: Mapping[str, float] = MappingProxyType({}),
    ) -> StepReport:
        """Write the episodes of a step and return its metrics; empty in processes other than the first.

        Raises:
            WorkFailedError: when no episode was scored.
        """
        if not self._workspace.leads:
            return StepReport({})
        all_groups, groups = groups, [group for group in groups if not group.episodes[0].is_sub_agent]
        episodes = [episode for group in groups for episode in group.episodes]
        outcomes = outcome_figures(episodes, f"step {step}")
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        mean = outcomes["reward"]
        dead = sum(group.dead for group in groups) / len(groups)
        line: dict[str, Any] = {
            **outcomes,
            "reward_std": math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
            "groups": len(groups),
            "dead_groups": dead,
            **step_figures(groups),
            **metrics,
            **self._gold.observe(step, [group.episodes for group in groups]),
            **reward_term_means(episodes),
            **environment_figures(groups),
            **{f"own/{name}": value for name, value in self._custom.figures(episodes).items()},
            **uniform_metrics([group.episodes for group in groups]),
        }
        line["collapse_alarm"] = self._collapse_alarm(step, lasting_reward(line), dead)
        if warning := self._form.observe(line):
            self._workspace.log(f"warning: step {step}: {warning}")
            self._workspace.event("rare_form", step=step)
        write_episodes(self._workspace.episodes / f"step-{step:06d}.parquet", add_advantages(all_groups))
        progress = {name: line[name] for name in ("reward", "pass_rate", "length")}
        progress["tokens_per_second"] = watch.figures()["tokens_per_second"]
        return StepReport(line, progress, timings, self._no_signal_error(step, dead))

    def _collapse_alarm(self, step: int, reward: float, dead: float) -> float:
        if not self._stop_without_signal:
            return 0.0
        if changed := self._collapse.observe(step, reward, dead):
            self._workspace.log(f"{'warning: ' if self._collapse.alarm else ''}step {step}: {changed}")
            self._workspace.event("collapse" if self._collapse.alarm else "recovery", step=step)
        return float(self._collapse.alarm)

    def _warnings(self, lines: Sequence[Mapping[str, Any]], samples: int) -> dict[str, list[str]]:
        """Return the warnings to show first in the summary of a finished run."""
        warnings = [self._form.warning] if self._form.warning else []
        watch = self._collapse
        if watch.since is not None:
            end = "has not recovered" if watch.alarm else "has recovered"
            warnings.append(
                f"the reward collapsed by step {watch.since} and {end}: {watch.mean:.3g} at the end,"
                f" {watch.best:.3g} at its best"
            )
        if self._stop_without_signal and not warnings and lines:  # self-play has no reward to gain
            warnings += filter(None, [little_learned_warning(lines, lines[-1]["groups"] * samples)])
        return {"warnings": warnings} if warnings else {}

    def _no_signal_error(self, step: int, dead: float) -> WorkFailedError | None:
        self._count_dead(dead)
        if not self._stop_without_signal or self._dead_in_a_row < MAX_DEAD_STEPS:
            return None
        return WorkFailedError(
            f"more than {MAX_DEAD_SHARE:.0%} of groups had equal rewards for {MAX_DEAD_STEPS} steps:"
            " there is nothing to learn from",
            where=f"step {step}",
            remedy=self._form.warning
            or "start from a checkpoint that passes at least 10 to 25% of tasks, choose easier tasks, or"
            " raise samples; if the reward fell to zero, lower lr",
        )

    def _count_dead(self, dead: float) -> None:
        self._dead_in_a_row = self._dead_in_a_row + 1 if dead > MAX_DEAD_SHARE else 0

    def summary(self, algorithm: Algorithm, samples: int) -> dict[str, Any]:
        """Return the first and last metrics, warnings, and the implicit objective (`objective_curve`).

        The objective is empty for an algorithm that does not compare the answers of a group. Everything is
        empty in processes other than the first.
        """
        if not self._workspace.leads:
            return {}
        lines = self._workspace.step_metrics()
        gaps = [line["logprob_gap_max"] for line in lines if "logprob_gap_max" in line]
        curve = objective_curve(algorithm, samples) if algorithm.compares == "group" else []
        return {
            "algorithm": algorithm.name,
            **self._warnings(lines, samples),
            **mean_first_and_last(lines, ("reward", "pass_rate", "length")),
            "logprob_gap_max": max(gaps, default=0.0),
            "failures": sum(line["failures"] for line in lines),
            "length_dynamics": compare_lengths(self._workspace),
            "implicit_objective": [list(point) for point in curve],
            **self._gold.summary(),
        }


def reward_term_means(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return `term/NAME`: the mean of each reward term over the episodes that have it."""
    terms: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.reward_terms.items():
            terms.setdefault(f"term/{name}", []).append(value)
    return {name: fmean(values) for name, values in sorted(terms.items())}


def compare_lengths(workspace: Workspace) -> dict[str, Any]:
    """Return `length_dynamics` from the first to the last 5 steps with stored episodes, or fewer."""
    files = sorted(workspace.episodes.glob("step-*.parquet"))
    edge = max(1, min(5, len(files) // 2))
    before, after = (
        [row for path in part for row in read_episodes(path)] for part in (files[:edge], files[-edge:])
    )
    return length_dynamics(before, after)


def add_advantages(groups: Sequence[WeightedGroup]) -> list[Episode]:
    """Return the episodes in order, with their advantages as the metric `advantage`."""
    episodes = []
    for group in groups:
        for index, episode in enumerate(group.episodes):
            advantage = None if group.advantages is None else float(group.advantages[index])
            if advantage is None or math.isnan(advantage):
                episodes.append(episode)
            else:
                episodes.append(replace(episode, metrics={**episode.metrics, "advantage": advantage}))
    return episodes
