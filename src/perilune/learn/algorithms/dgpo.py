"""DGPO: GRPO whose advantage goes, within an answer, to tokens that left the reference while in doubt.

arXiv 2605.03327, as independent implementations have it. A token's deviation d is the squared Hellinger
distance of its distribution to the reference's, its uncertainty h the entropy over log V; the softmax of
d h^kappa / tau over the answer, times its length, says what share each token has of the answer's advantage.
Both are of the policy that begins the step, constants of the gradient. Weights have mean 1 in each answer.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from perilune.data.episode import Episode
from perilune.learn.advantages import Tokens, standardised
from perilune.learn.algorithms.base import ClippedPolicyGradient, Group, Signal, StepContext
from perilune.learn.weights import WeightedGroup, rewards


class DGPO(ClippedPolicyGradient):
    """A = GRPO's, times w. At a step where the policy is still the reference, w is 1 and this is GRPO."""

    name: Literal["dgpo"] = Field("dgpo", description="which algorithm this is")
    clip_high: float = Field(0.2, gt=0, description="the ratio is clipped above 1 + clip_high")
    tau: float = Field(0.5, gt=0, description="temperature of the shares; no two differ more than e^(1/tau)")
    kappa: float = Field(1.0, ge=0, description="how much uncertainty counts; 0 is not at all")
    squared: bool = Field(True, description="whether the Hellinger distance is taken squared")

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({"deviation", "uncertainty"})

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        scores = rewards(group)
        advantages = standardised(scores)
        shares = [
            self.shares(episode, context) if advantage and not np.isnan(advantage) else np.zeros(0)
            for episode, advantage in zip(group, advantages, strict=True)
        ]
        scale = [a * w if len(w) else a for a, w in zip(advantages, shares, strict=True)]
        every = np.concatenate([np.zeros(0), *shares])
        every = every[every > 0]
        spread = (
            {"dgpo_weight_std": float(every.std()), "dgpo_weight_max": float(every.max())}
            if len(every)
            else {}
        )
        return self.compared(group, scores, scale, context, figures=spread)

    def shares(self, episode: Episode, context: StepContext) -> Tokens:
        """float64[T] weights of an answer's tokens, 0 at masked ones, 1 on average at others."""
        mask = episode.loss_mask
        if not mask.any():
            return np.zeros(len(mask))
        deviation = context.signal("deviation", episode)
        distance = deviation if self.squared else np.sqrt(deviation)
        score = distance * context.signal("uncertainty", episode) ** self.kappa / self.tau
        raised = np.where(mask, np.exp(score - score[mask].max()), 0.0)
        return np.asarray(raised * mask.sum() / raised.sum())
