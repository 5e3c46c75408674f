"""The advantage check: what an algorithm makes of rewards must be about the episode that earned them.

Three things hold of every algorithm here, whatever its formula. An episode's weights do not depend on its
place in the group. A group that is compared within does not depend on the other groups of its step. A reward
never makes its answer less likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from perilune.errors import REPORT_BUG, WorkFailedError
from perilune.learn.weights import WeightedGroup
from perilune.tasks.checks.twin import Twin

TOLERANCE = 1e-4  # relative to the largest weight

Weights = dict[str, NDArray[np.float32]]


def check_advantages(twin: Twin) -> None:
    """Weigh a few groups several times.

    Raises:
        WorkFailedError: saying what the weights of an episode wrongly depend on.
    """
    algorithm, (first, second) = twin.spec.algorithm, twin.groups
    right = _by_episode(twin.weight_groups([first, second]))
    swapped = (first[1], first[0], *first[2:])
    if _differ(right, _by_episode(twin.weight_groups([swapped, second]))):
        raise _wrong(
            f"{algorithm.name} weighs an episode by its place in the group: its reward or advantage is"
            " another episode's"
        )
    if algorithm.compares == "group" and _differ(right, _by_episode(twin.weight_groups([first]))):
        raise _wrong(
            f"{algorithm.name} compares within a group, and its weights change with the other groups: its"
            " baseline or scale is of other answers"
        )
    name = first[0].episode_id
    worthless = (replace(first[0], reward=0.0), *first[1:])
    wrong = float(_by_episode(twin.weight_groups([worthless, second]))[name].sum())
    if float(right[name].sum()) < wrong:
        raise _wrong(
            f"{algorithm.name} makes an answer less likely for being right: its weights add up to"
            f" {right[name].sum():.3g} with the reward, and to {wrong:.3g} without"
        )


def _by_episode(groups: Sequence[WeightedGroup]) -> Weights:
    """Policy-gradient weights, without the share of the denominator that goes by the whole step."""
    return {
        episode.episode_id: weights
        for group in groups
        if group.policy_gradient is not None
        for episode, weights in zip(group.episodes, group.policy_gradient.weights, strict=True)
    }


def _differ(some: Weights, others: Weights) -> bool:
    size = max((float(np.abs(one).max(initial=0.0)) for one in some.values()), default=0.0)
    return any(np.abs(some[name] - others[name]).max(initial=0.0) > TOLERANCE * size for name in others)


def _wrong(what: str) -> WorkFailedError:
    return WorkFailedError(what, where="preflight", remedy=REPORT_BUG)
