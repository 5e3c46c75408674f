"""Auxiliary rewards: reward terms that are added to the reward with weights that fall to 0 during training.

They reward behavior that a policy would not find from the reward alone. At the end of training only the
reward counts. Source: PARL's terms parallel and finish (Kimi K2.5, arXiv 2602.02276), whose schedule is not
published; here it is linear.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from perilune.environments.core.rewards import GOLD_METRIC
from perilune.errors import RequestError
from perilune.frozen import Frozen

if TYPE_CHECKING:  # both import torch or pyarrow, and every reader of a recipe imports this module
    from perilune.data.episode import Episode
    from perilune.rollout.groups import Groups


class AuxiliaryRewards(Frozen):
    """The reward terms to add, their weights, and their duration."""

    weights: dict[str, float] = Field(
        min_length=1, description="weight of each reward term of the environment at the first step"
    )
    until: float = Field(
        0.5, gt=0, le=1, description="share of the steps over which the weights fall linearly to 0"
    )

    def scale(self, step: int, steps: int) -> float:
        """Return the factor of the weights, from 1 to 0, at step `step` (counted from 1) of `steps`."""
        return max(0.0, 1 - (step - 1) / (self.until * steps))

    def describe(self) -> str:
        terms = " + ".join(f"{weight:g} {name}" for name, weight in self.weights.items())
        return f"{terms}, falling to 0 over {self.until:.0%} of the steps"

    def add(self, groups: Groups, step: int, steps: int) -> Groups:
        """Return the groups with a step's auxiliary rewards; the metric "gold" keeps the original reward.

        A term that an episode lacks, for example because a limit ended it, counts 0.

        Raises:
            RequestError: as `require_terms`.
        """
        scored = [episode for group in groups for episode in group if episode.reward is not None]
        self.require_terms({name for episode in scored for name in episode.reward_terms})
        scale = self.scale(step, steps)
        return [tuple(self._add_terms(episode, scale) for episode in group) for group in groups]

    def _add_terms(self, episode: Episode, scale: float) -> Episode:
        if episode.reward is None:
            return episode
        terms = episode.reward_terms
        extra = math.fsum(weight * terms.get(name, 0.0) for name, weight in self.weights.items())
        metrics = {GOLD_METRIC: episode.reward, **episode.metrics}
        return replace(episode, reward=episode.reward + scale * extra, metrics=metrics)

    def require_terms(self, known: Collection[str]) -> None:
        """Check that episodes have the terms of `weights`.

        Args:
            known: the reward terms of all scored episodes. If it is empty, nothing is checked.

        Raises:
            RequestError: naming a term that no episode has.
        """
        for name in self.weights.keys() - known if known else ():
            raise RequestError(
                f"no episode has the reward term '{name}'",
                where=f"auxiliary_rewards.weights.{name}",
                remedy=f"one of: {', '.join(sorted(known))}",
            )
