"""GSPO: one ratio an episode, the geometric mean of its tokens' ratios, clipped as a whole.

Zheng et al., arXiv 2507.18071. An episode is in or out with all its tokens, so that the noise of single
tokens (of a mixture of experts above all) does not decide; hence bounds a thousand times closer to 1.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perilune.learn.advantages import standardised
from perilune.learn.algorithms.base import ClippedPolicyGradient, Group, StepContext
from perilune.learn.weights import Aggregation, Surrogate, WeightedGroup, rewards


class GSPO(ClippedPolicyGradient):
    """GRPO's advantages under the sequence ratio, mean over episodes of token means."""

    name: Literal["gspo"] = Field("gspo", description="which algorithm this is")
    aggregation: Aggregation = Field(
        "seq-mean-token-mean", description="over what a token's loss is averaged"
    )
    clip_low: float = Field(3e-4, gt=0, lt=1, description="the ratio is clipped below 1 - clip_low")
    clip_high: float = Field(4e-4, gt=0, description="the ratio is clipped above 1 + clip_high")

    @property
    def surrogate(self) -> Surrogate:
        low, high = 1 - self.clip_low, 1 + self.clip_high
        return Surrogate(ratio="sequence", low=low, high=high, dual=self.dual_clip)

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        scores = rewards(group)
        return self.compared(group, scores, standardised(scores), context)
