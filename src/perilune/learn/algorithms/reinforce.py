"""REINFORCE++: each token's reward-to-go is whitened over all tokens of the batch, whatever their prompt.

Hu et al., arXiv 2501.03262. The paper subtracts the KL to the reference from the rewards. Here, the KL is a
loss by default; `kl_estimator: k1_reward` subtracts it as the paper does.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from perilune.learn.advantages import Rewards, centred, rewards_to_go, token_rewards, whitened
from perilune.learn.algorithms.base import ClippedPolicyGradient, Group, StepContext
from perilune.learn.weights import WeightedGroup, rewards


class ReinforcePP(ClippedPolicyGradient):
    """A = (G - mean) / std over the batch's tokens, G_t = r_t + gamma G_{t+1}.

    One sample per task is enough.
    """

    compares: ClassVar[Literal["group", "batch", "nothing"]] = "batch"
    takes_step_rewards: ClassVar[bool] = True

    name: Literal["reinforce_pp"] = Field("reinforce_pp", description="name of the algorithm")
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token")

    @property
    def least_samples(self) -> int:
        return 1

    def outcomes(self, scores: Rewards) -> Rewards:
        """Return the outcome rewards float64[G] of a group's answers."""
        return scores

    def weight_groups(self, groups: Sequence[Group], context: StepContext) -> list[WeightedGroup]:
        scores = [rewards(group) for group in groups]
        judged = [
            (episode, value)
            for group, values in zip(groups, scores, strict=True)
            for episode, value in zip(group, self.outcomes(values), strict=True)
            if not np.isnan(value)
        ]
        masks = [episode.loss_mask for episode, _ in judged]
        returns = [rewards_to_go(token_rewards(e, value), e.loss_mask, self.gamma) for e, value in judged]
        whitened_returns = iter(whitened(returns, masks))
        weighted = []
        for group, values in zip(groups, scores, strict=True):
            advantages = [np.nan if np.isnan(value) else next(whitened_returns) for value in values]
            dead = not any(np.any(a) for a in advantages if not np.isscalar(a))
            weighted.append(self.weight_tokens(group, values, advantages, context, dead=dead))
        return weighted


class ReinforcePPBaseline(ReinforcePP):
    """REINFORCE++ on centred rewards, r - mean of the group.

    The divisor is the standard deviation of the centred rewards, so tasks that are merely easy or hard do not
    increase it.
    """

    name: Literal["reinforce_pp_baseline"] = Field(  # type: ignore[assignment]
        "reinforce_pp_baseline", description="name of the algorithm"
    )

    @property
    def least_samples(self) -> int:
        return 2

    def outcomes(self, scores: Rewards) -> Rewards:
        return centred(scores)
