"""DGPO: GRPO that gives more of an answer's advantage to uncertain tokens far from the reference.

arXiv 2605.03327, following independent implementations. A token's deviation d is the squared Hellinger
distance between the policy's distribution and the reference's. The uncertainty h is the entropy of the
policy's distribution, divided by log V. A token's weight is the softmax of d h^kappa / tau over the answer,
times the answer's length, so the weights of an answer have mean 1. d and h are computed once a step, by the
policy at its beginning, and carry no gradient.
"""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from perilune.data.episode import Episode
from perilune.learn.advantages import Tokens, standardized
from perilune.learn.algorithms.base import ClippedPolicyGradient, Group, Signal, StepContext
from perilune.learn.weights import WeightedGroup, rewards


class DGPO(ClippedPolicyGradient):
    """A = w times GRPO's advantage. While the policy equals the reference, w is 1 and this is GRPO."""

    sparse: ClassVar[bool] = True  # with a small tau, one token may get almost all of the weight

    name: Literal["dgpo"] = Field("dgpo", description="name of the algorithm")
    clip_high: float = Field(0.2, gt=0, description="clip ratios above 1 + clip_high")
    tau: float = Field(
        0.5,
        gt=0,
        description="temperature of the token weights; the weights of two tokens of an answer differ by a"
        " factor of at most e^(1/tau)",
    )
    kappa: float = Field(
        1.0,
        ge=0,
        description="exponent of a token's uncertainty (its entropy divided by log V, V the size of the"
        " vocabulary) in its weight; 0: uncertainty is ignored",
    )
    squared: bool = Field(
        True,
        description="true: weight tokens by the squared Hellinger distance between policy and reference;"
        " false: by the distance itself",
    )

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({"deviation", "uncertainty"})

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        scores = rewards(group)
        advantages = standardized(scores)
        weights = [
            self.token_weights(episode, context) if advantage and not np.isnan(advantage) else np.zeros(0)
            for episode, advantage in zip(group, advantages, strict=True)
        ]
        scale = [a * w if len(w) else a for a, w in zip(advantages, weights, strict=True)]
        positive = np.concatenate([np.zeros(0), *weights])
        positive = positive[positive > 0]
        spread = {}
        if len(positive):
            spread = {"dgpo_weight_std": float(positive.std()), "dgpo_weight_max": float(positive.max())}
        return self.weight_tokens(group, scores, scale, context, figures=spread)

    def token_weights(self, episode: Episode, context: StepContext) -> Tokens:
        """Return the weights of an answer's tokens, float64[T]: 0 at masked tokens, mean 1 at the others."""
        mask = episode.loss_mask
        if not mask.any():
            return np.zeros(len(mask))
        deviation = context.signal("deviation", episode)
        distance = deviation if self.squared else np.sqrt(deviation)
        score = distance * context.signal("uncertainty", episode) ** self.kappa / self.tau
        exponentials = np.where(mask, np.exp(score - score[mask].max()), 0.0)
        return np.asarray(exponentials * mask.sum() / exponentials.sum())
