"""RLOO: each reward against the mean of the others in its group.

Ahmadian et al., arXiv 2402.14740. The baseline does not depend on the episode it is taken from, so the
gradient is that of the expected reward, without bias. It is Dr. GRPO's times K / (K - 1).

The paper takes an answer for one action, whose ratio is the product of its tokens' ratios. On-policy all
ratios are 1 and both have one gradient. Off-policy the variance of the product grows with the length.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from perilune.learn.advantages import leave_one_out
from perilune.learn.algorithms.base import ClippedPolicyGradient, Group, StepContext
from perilune.learn.weights import Aggregation, Surrogate, WeightedGroup, rewards


class RLOO(ClippedPolicyGradient):
    """A = r - mean of the other rewards, each sequence summed over a constant length."""

    name: Literal["rloo"] = Field("rloo", description="which algorithm this is")
    aggregation: Aggregation = Field(
        "seq-mean-token-sum-norm", description="over what a token's loss is averaged"
    )

    ratio: Literal["token", "sequence-product"] = Field(
        "token", description="what is clipped: each token's ratio, or the answer's, as in TRL"
    )

    @property
    def surrogate(self) -> Surrogate:
        return replace(super().surrogate, ratio=self.ratio)

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        scores = rewards(group)
        return self.compared(group, scores, leave_one_out(scores), context)
