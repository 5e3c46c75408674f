"""Dr. GRPO: rewards centred within the group, token sums over a constant length.

Liu et al., arXiv 2503.20783: without the division by the group's spread every task counts alike, and
without the division by the response's length so does every token. Up to a constant this is RLOO.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perilune.learn.advantages import centred
from perilune.learn.algorithms.base import ClippedPolicyGradient, Group, StepContext
from perilune.learn.weights import Aggregation, WeightedGroup, rewards


class DrGRPO(ClippedPolicyGradient):
    """A = r - mean, each sequence summed and divided by the longest completion the run allows."""

    name: Literal["dr_grpo"] = Field("dr_grpo", description="which algorithm this is")
    aggregation: Aggregation = Field(
        "seq-mean-token-sum-norm", description="over what a token's loss is averaged"
    )

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        scores = rewards(group)
        return self.compared(group, scores, centred(scores), context)
