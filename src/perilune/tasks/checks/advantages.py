"""The advantage check: the token weights of an episode must follow from its own reward.

Three properties hold for every algorithm. The weights of an episode do not depend on its place in the group.
If the algorithm compares the answers of a group, they do not depend on other groups. A higher reward never
makes an answer less likely.
"""

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
    """Compare the token weights of the twin's groups before and after changes to the groups.

    Raises:
        WorkFailedError: when a property does not hold.
    """
    algorithm, (first, second) = twin.spec.algorithm, twin.groups
    weights = _by_episode(twin.weight_groups([first, second]))
    swapped = (first[1], first[0], *first[2:])
    if _differ(weights, _by_episode(twin.weight_groups([swapped, second]))):
        raise _error(
            f"{algorithm.name} weighs an episode by its place in the group: its reward or advantage is"
            " another episode's"
        )
    if algorithm.compares == "group" and _differ(weights, _by_episode(twin.weight_groups([first]))):
        raise _error(
            f"{algorithm.name} compares within a group, and its weights change with the other groups: its"
            " baseline or scale comes from other groups"
        )
    name = first[0].episode_id
    unrewarded = (replace(first[0], reward=0.0), *first[1:])
    without = float(_by_episode(twin.weight_groups([unrewarded, second]))[name].sum())
    if float(weights[name].sum()) < without:
        raise _error(
            f"{algorithm.name} makes an answer less likely for being right: its weights add up to"
            f" {weights[name].sum():.3g} with the reward, and to {without:.3g} without"
        )


def _by_episode(groups: Sequence[WeightedGroup]) -> Weights:
    """Return the policy-gradient weights by episode, before division by the step's denominator."""
    return {
        episode.episode_id: weights
        for group in groups
        if group.policy_gradient is not None
        for episode, weights in zip(group.episodes, group.policy_gradient.weights, strict=True)
    }


def _differ(weights: Weights, others: Weights) -> bool:
    size = max((float(np.abs(array).max(initial=0.0)) for array in weights.values()), default=0.0)
    return any(np.abs(weights[name] - others[name]).max(initial=0.0) > TOLERANCE * size for name in others)


def _error(message: str) -> WorkFailedError:
    return WorkFailedError(message, where="preflight", remedy=REPORT_BUG)
