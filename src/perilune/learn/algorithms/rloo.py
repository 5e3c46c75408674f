"""RLOO: each reward against the mean of the others in its group.

Ahmadian et al., arXiv 2402.14740. The baseline does not depend on the episode it is taken from, so the
gradient is that of the expected reward, without bias. It is Dr. GRPO's times K / (K - 1).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perilune.learn.advantages import leave_one_out
from perilune.learn.algorithms.base import ClippedPolicyGradient, Group, StepContext
from perilune.learn.weights import Aggregation, GroupWeights, rewards


class RLOO(ClippedPolicyGradient):
    """A = r - mean of the other rewards, each sequence summed over a constant length."""

    name: Literal["rloo"] = Field("rloo", description="which algorithm this is")
    aggregation: Aggregation = Field(
        "seq-mean-token-sum-norm", description="over what a token's loss is averaged"
    )

    def weigh_group(self, group: Group, context: StepContext) -> GroupWeights:
        scores = rewards(group)
        return self.compared(group, scores, leave_one_out(scores), context)
