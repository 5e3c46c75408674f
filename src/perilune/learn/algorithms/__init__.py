"""Algorithms by name. One algorithm is one small file with one function, `weights`.

Nothing here imports torch: what a token is worth is arithmetic on rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from perilune.data.episode import Episode
from perilune.errors import RequestError
from perilune.learn.algorithms import dr_grpo, grpo, sft
from perilune.learn.weights import GroupWeights


class Algorithm(Protocol):
    """Turns the episodes of one prompt into per-token weights of the three loss components."""

    def __call__(self, group: Sequence[Episode], *, max_tokens: int, kl: float = 0.0) -> GroupWeights:
        """Weigh a group.

        Args:
            group: episodes of one prompt; those with a `failure` get no weight.
            max_tokens: the longest completion the run allows, a constant of the run.
            kl: coefficient of the KL to the reference policy; 0 leaves the component out.

        Raises:
            WorkFailedError: naming an episode whose reward is NaN, infinite or missing without a failure.
        """
        ...


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": grpo.weights,
    "dr_grpo": dr_grpo.weights,
    "sft": sft.weights,
}


def algorithm(name: str) -> Algorithm:
    """The algorithm called `name`.

    Raises:
        RequestError: when there is none, naming those there are.
    """
    if name not in ALGORITHMS:
        raise RequestError(f"no algorithm called '{name}'", remedy=f"one of: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]
