"""The metrics and episodes of every step of reinforcement learning, and the stop of a run without signal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from perilune.bundle.workspace import Workspace
from perilune.data.episode import Episode
from perilune.data.episodes_file import read_episodes, write_episodes
from perilune.errors import WorkFailedError
from perilune.learn.algorithms import Algorithm
from perilune.learn.objective import objective_curve
from perilune.learn.weights import WeightedGroup, step_figures
from perilune.metrics.length_dynamics import length_dynamics
from perilune.rollout.failures import failure_figures
from perilune.rollout.timing import Stopwatch
from perilune.tasks.checks.collapse import CollapseWatch
from perilune.tasks.checks.gold_watch import GoldWatch
from perilune.tasks.stage.outcomes import passed, strategies
from perilune.tasks.stage.training import StepReport, first_and_last

DEAD_LIMIT = 0.95  # share of dead groups above which a step has no signal
DEAD_PATIENCE = 20  # such steps in a row after which the run is stopped


class Recorder:
    """Turns each step into metrics, writes its episodes, and stops a run that has nothing to learn from.

    Make it after the workspace was rewound: it reads the metrics of earlier attempts. Pass rates and rewards
    are means over all scored episodes, dead groups among them.

    Args:
        stop_without_signal: stop after `DEAD_PATIENCE` steps in which nearly all groups were dead.
    """

    def __init__(self, workspace: Workspace, gold: GoldWatch, *, stop_without_signal: bool = True) -> None:
        self._workspace = workspace
        self._stop_without_signal = stop_without_signal
        self._gold = gold
        self._dead_in_a_row = 0
        workspace.episodes.mkdir(exist_ok=True)
        self._collapse = CollapseWatch()
        for line in workspace.metrics():
            self._count_dead(line["dead_groups"])
            self._collapse.observe(line["step"], line["reward"], line["dead_groups"])

    def record(
        self, step: int, groups: Sequence[WeightedGroup], figures: Mapping[str, float], watch: Stopwatch
    ) -> StepReport:
        """Write the episodes of a step and return its metrics; only the process that leads has any.

        Raises:
            WorkFailedError: when no episode was scored.
        """
        if not self._workspace.leads:
            return StepReport({})
        episodes = [one for group in groups for one in group.episodes]
        rewards = [one.reward for one in episodes if one.reward is not None]
        if not rewards:
            first = episodes[0].failure
            raise WorkFailedError(f"the verifier judged no episode: {first}", where=f"step {step}")
        mean = math.fsum(rewards) / len(rewards)
        dead = sum(group.dead for group in groups) / len(groups)
        line: dict[str, Any] = {
            "reward": mean,
            "pass_rate": sum(map(passed, episodes)) / len(rewards),
            "reward_std": math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
            "groups": len(groups),
            "dead_groups": dead,
            **failure_figures(episodes),
            "length": sum(one.sampled for one in episodes) / len(episodes),
            "truncated": sum(one.truncated for one in episodes) / len(episodes),
            **step_figures(groups),
            **figures,
            **self._gold.look(step, episodes),
        }
        line |= term_means(episodes) | {"collapse_alarm": self._watch_collapse(step, mean, dead)}
        for name, found in strategies(episodes).items():
            line[f"strategy/{name}"] = found["share"]
            line[f"accuracy/{name}"] = found["accuracy"]
        write_episodes(self._workspace.episodes / f"step-{step:06d}.parquet", with_advantages(groups))
        shown = {name: line[name] for name in ("reward", "pass_rate", "length")}
        shown["tokens_per_second"] = watch.figures()["tokens_per_second"]
        return StepReport(line, shown, failure=self._without_signal(step, dead))

    def _watch_collapse(self, step: int, reward: float, dead: float) -> float:
        if changed := self._collapse.observe(step, reward, dead):
            self._workspace.log(f"{'warning: ' if self._collapse.alarm else ''}step {step}: {changed}")
            self._workspace.event("collapse" if self._collapse.alarm else "recovery", step=step)
        return float(self._collapse.alarm)

    def _warnings(self) -> dict[str, list[str]]:
        """What the reader of a finished run must know first."""
        watch = self._collapse
        if watch.since is None:
            return {}
        end = "has not recovered" if watch.alarm else "has recovered"
        return {
            "warnings": [
                f"the reward collapsed by step {watch.since} and {end}: {watch.mean:.3g} at the end,"
                f" {watch.best:.3g} at its best"
            ]
        }

    def _without_signal(self, step: int, dead: float) -> WorkFailedError | None:
        self._count_dead(dead)
        if not self._stop_without_signal or self._dead_in_a_row < DEAD_PATIENCE:
            return None
        return WorkFailedError(
            f"more than {DEAD_LIMIT:.0%} of groups had equal rewards for {DEAD_PATIENCE} steps:"
            " there is nothing to learn from",
            where=f"step {step}",
            remedy="start from a checkpoint that passes at least 10 to 25% of tasks, choose easier tasks"
            " or more samples; if the reward fell to zero, lower lr",
        )

    def _count_dead(self, dead: float) -> None:
        self._dead_in_a_row = self._dead_in_a_row + 1 if dead > DEAD_LIMIT else 0

    def summary(self, algorithm: Algorithm, samples: int) -> dict[str, Any]:
        """First and last figures, and what the estimator climbs, if that can be said of groups alone."""
        if not self._workspace.leads:
            return {}
        lines = self._workspace.metrics()
        gaps = [line["logprob_gap_max"] for line in lines if "logprob_gap_max" in line]
        curve = objective_curve(algorithm, samples) if algorithm.compares == "group" else []
        return {
            "algorithm": algorithm.name,
            **self._warnings(),
            **first_and_last(lines, ("reward", "pass_rate", "length")),
            "logprob_gap_max": max(gaps, default=0.0),
            "failures": sum(line["failures"] for line in lines),
            "length_dynamics": lengths_over(self._workspace),
            "implicit_objective": [list(point) for point in curve],
            **self._gold.summary(),
        }


def term_means(episodes: Sequence[Episode]) -> dict[str, float]:
    """`term/NAME`: mean of each reward term over the episodes that have it."""
    found: dict[str, list[float]] = {}
    for one in episodes:
        for name, value in one.reward_terms.items():
            found.setdefault(f"term/{name}", []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in sorted(found.items())}


def lengths_over(workspace: Workspace) -> dict[str, Any]:
    """`length_dynamics` from the first to the last few steps that left episodes."""
    files = sorted(workspace.episodes.glob("step-*.parquet"))
    edge = max(1, min(5, len(files) // 2))
    before, after = (
        [one for path in part for one in read_episodes(path)] for part in (files[:edge], files[-edge:])
    )
    return length_dynamics(before, after)


def with_advantages(groups: Sequence[WeightedGroup]) -> list[Episode]:
    """Episodes in order, each with its advantage among its metrics."""
    episodes = []
    for group in groups:
        for index, one in enumerate(group.episodes):
            advantage = None if group.advantages is None else float(group.advantages[index])
            if advantage is None or math.isnan(advantage):
                episodes.append(one)
            else:
                episodes.append(replace(one, metrics={**one.metrics, "advantage": advantage}))
    return episodes
