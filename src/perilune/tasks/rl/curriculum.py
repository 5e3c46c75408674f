"""A curriculum by pass rate: prefers tasks with both right and wrong answers.

Each step takes `candidates` times as many tasks from the stream as it needs, and draws among them without
replacement. The probability of a task grows with the expected variance p (1 - p) of its answers, where p is
the pass rate of its stratum: groups whose answers are all right or all wrong have no gradient. The pool is a
uniform sample, and the inclusion probability of each drawn task is known, so figures and gradients of the
uniform objective can be estimated without bias (Horvitz and Thompson 1952).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perilune.data.episode import Episode
from perilune.environments.core.mixture import environment_name
from perilune.environments.core.protocol import Environment, Task
from perilune.learn.off_policy import effective_share
from perilune.learn.weights import Component, WeightedGroup
from perilune.rollout.groups import Groups
from perilune.tasks.rl.curriculum_settings import CurriculumSettings
from perilune.tasks.stage.outcomes import is_correct

PROBABILITY = "sampling_probability"  # metric of an episode: inclusion probability of its task in the draw
MIN_STRATUM_ANSWERS = 0.01  # answers below which a stratum counts as never seen

Array = NDArray[np.float64]


class Curriculum:
    """Draws tasks, and counts right answers by stratum: a difficulty, a part of a mixture, or a single task.

    Args:
        seed: the run's seed; a draw depends only on the seed, the step and the counts.
        counts: for each stratum the decayed numbers of right and of all answers. Updated in place.
    """

    def __init__(
        self,
        settings: CurriculumSettings,
        environment: Environment,
        seed: int,
        counts: dict[str, list[float]],
    ) -> None:
        self.settings, self._environment, self._counts = settings, environment, counts
        self._seed = seed

    def draw(self, pool: Sequence[Task], count: int, *key: int) -> list[tuple[Task, float]]:
        """Draw `count` tasks, in the order of the pool, with the inclusion probability of each.

        Args:
            key: distinguishes the draws of a run.
        """
        weights = np.array([self._weight(self._stratum(task)) for task in pool])
        probabilities = inclusion_probabilities(weights, count)
        random = np.random.default_rng([self._seed, *key])
        order = random.permutation(len(pool))  # in a periodic order, systematic draws would repeat
        chosen = order[systematic_sample(probabilities[order], random.random())]
        return [(pool[index], float(probabilities[index])) for index in sorted(chosen)]

    def observe(self, tasks: Mapping[str, Task], groups: Groups) -> None:
        """Decay the counts, then add the answers of a step. Failed episodes are not counted."""
        for count in self._counts.values():
            count[:] = [value * self.settings.decay for value in count]
        for group in groups:
            scored = [episode for episode in group if not episode.failure]
            count = self._counts.setdefault(self._stratum(tasks[group[0].task_id]), [0.0, 0.0])
            count[0] += sum(map(is_correct, scored))
            count[1] += len(scored)
        for stratum in [name for name, (_, n) in self._counts.items() if n < MIN_STRATUM_ANSWERS]:
            del self._counts[stratum]

    def _stratum(self, task: Task) -> str:
        if self.settings.by == "task":
            return task.task_id
        name = environment_name(self._environment, task)
        by_difficulty = self.settings.by == "difficulty" and task.difficulty is not None
        return f"{name} {task.difficulty:g}" if by_difficulty else name

    def _weight(self, stratum: str) -> float:
        """Return a weight from `floor` to 1: it grows with the mean of p (1 - p) under Beta(a, b)."""
        right, total = self._counts.get(stratum, (0.0, 0.0))
        a, b = right + self.settings.prior, total - right + self.settings.prior
        variance = a * b / ((a + b) * (a + b + 1))
        return self.settings.floor + (1 - self.settings.floor) * 4 * variance


def inclusion_probabilities(weights: Array, count: int) -> Array:
    """Return float64[N], proportional to `weights` and at most 1, with the sum `count`.

    Args:
        weights: float64[N], positive; N is at least `count`.
    """
    certain = np.zeros(len(weights), np.bool_)
    while True:
        scale = (count - certain.sum()) / max(weights[~certain].sum(), np.finfo(np.float64).tiny)
        probabilities = np.where(certain, 1.0, scale * weights)
        if not (above := ~certain & (probabilities > 1)).any():
            return probabilities
        certain |= above


def systematic_sample(probabilities: Array, start: float) -> list[int]:
    """Return the indices drawn without replacement, each with its inclusion probability (Madow 1949).

    Args:
        probabilities: at most 1 each; their sum is the number of indices.
        start: uniform in [0, 1).
    """
    ends = np.cumsum(probabilities)
    ends[-1] = round(ends[-1])
    return [int(index) for index in np.flatnonzero(np.diff(np.floor(np.append(0.0, ends) - start)))]


def add_probabilities(groups: Groups, probabilities: Mapping[str, float]) -> Groups:
    """Return the groups with the inclusion probability of their task as a metric of each episode."""
    return [
        tuple(replace(e, metrics={**e.metrics, PROBABILITY: probabilities[e.task_id]}) for e in group)
        for group in groups
    ]


def uniform_metrics(groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
    """Return `uniform/...`: reward and pass rate of a uniform draw, and the effective share of groups.

    Means over groups, weighted by the inverse of their probabilities (Hajek's estimator). Empty without a
    curriculum.
    """
    weights, rewards, rates = [], [], []
    for group in groups:
        scored = [episode for episode in group if episode.reward is not None]
        if scored and PROBABILITY in scored[0].metrics:
            weights.append(1 / scored[0].metrics[PROBABILITY])
            rewards.append(math.fsum(episode.reward or 0.0 for episode in scored) / len(scored))
            rates.append(sum(map(is_correct, scored)) / len(scored))
    if not weights:
        return {}
    return {
        "uniform/reward": float(np.average(rewards, weights=weights)),
        "uniform/pass_rate": float(np.average(rates, weights=weights)),
        "uniform/ess": effective_share(np.array(weights)),
    }


def apply_importance_weights(
    groups: Sequence[WeightedGroup], settings: CurriculumSettings | None
) -> list[WeightedGroup]:
    """Return the groups with the loss weights of the uniform objective, if the settings ask for them.

    The weights are multiplied by the task's probability in a uniform draw, 1 / candidates, and divided by its
    probability in the draw.
    """
    if settings is None or not settings.importance_weight:
        return list(groups)
    return [
        _scale_group(group, 1 / (settings.candidates * group.episodes[0].metrics[PROBABILITY]))
        for group in groups
    ]


def _scale_group(group: WeightedGroup, factor: float) -> WeightedGroup:
    changed: dict[str, Any] = {
        name: Component(tuple(np.float32(factor) * weights for weights in part.weights), part.counts)
        for name, part in group.components.items()
    }
    if group.value is not None:
        changed["value"] = replace(group.value, component=changed["value"])
    return replace(group, **changed)
