"""CISPO: every token keeps its gradient, weighted by its ratio up to a limit.

MiniMax, arXiv 2506.13585. PPO's clip takes the gradient of rare but decisive tokens away; here only their
weight is bounded. The bounds are of the ratio itself: below 1 the upper one would shrink every token even
where nothing is stale.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perilune.learn.advantages import standardised
from perilune.learn.algorithms.base import Group, PolicyGradient, StepContext
from perilune.learn.weights import Surrogate, WeightedGroup, rewards


class CISPO(PolicyGradient):
    """Token loss -sg(clipped ratio) A log pi, with GRPO's A."""

    name: Literal["cispo"] = Field("cispo", description="which algorithm this is")
    ratio_min: float = Field(0.0, ge=0, le=1, description="smallest weight of a ratio")
    ratio_max: float = Field(5.0, ge=1, description="largest weight of a ratio")

    @property
    def surrogate(self) -> Surrogate:
        return Surrogate(clip="weight", low=self.ratio_min, high=self.ratio_max)

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        scores = rewards(group)
        return self.compared(group, scores, standardised(scores), context)
