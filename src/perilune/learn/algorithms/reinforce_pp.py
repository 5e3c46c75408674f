"""REINFORCE++: each token's reward-to-go against all tokens of the batch, whatever their prompt.

Hu et al., arXiv 2501.03262. One sample a prompt is enough. The KL to the reference is a loss of its own here
and not, as in the paper, taken off the rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from perilune.learn.advantages import Tokens, rewards_to_go, token_rewards, whitened
from perilune.learn.algorithms.base import ClippedPolicyGradient, Group, StepContext
from perilune.learn.weights import WeightedGroup, rewards


class ReinforcePP(ClippedPolicyGradient):
    """A = (G - mean) / std over the batch's tokens, G_t = r_t + gamma G_{t+1}."""

    compares: ClassVar[Literal["group", "batch", "nothing"]] = "batch"
    takes_step_rewards: ClassVar[bool] = True

    name: Literal["reinforce_pp"] = Field("reinforce_pp", description="which algorithm this is")
    gamma: float = Field(1.0, gt=0, le=1, description="discount of a reward, for each token before it")

    @property
    def least_samples(self) -> int:
        return 1

    def weight_groups(self, groups: Sequence[Group], context: StepContext) -> list[WeightedGroup]:
        scores = [rewards(group) for group in groups]
        return self.whiten(groups, scores, scores, context)

    def whiten(
        self, groups: Sequence[Group], scores: Sequence[Tokens], worth: Sequence[Tokens], context: StepContext
    ) -> list[WeightedGroup]:
        """Weights from what each judged episode is worth, float64[G] a group, whitened over the batch."""
        judged = [
            (episode, value)
            for group, values in zip(groups, worth, strict=True)
            for episode, value in zip(group, values, strict=True)
            if not np.isnan(value)
        ]
        masks = [episode.loss_mask for episode, _ in judged]
        returns = [rewards_to_go(token_rewards(e, value), e.loss_mask, self.gamma) for e, value in judged]
        white = iter(whitened(returns, masks))
        found = []
        for group, values in zip(groups, scores, strict=True):
            advantages = [np.nan if np.isnan(value) else next(white) for value in values]
            dead = not any(np.any(a) for a in advantages if not np.isscalar(a))
            found.append(self.compared(group, values, advantages, context, dead=dead))
        return found
