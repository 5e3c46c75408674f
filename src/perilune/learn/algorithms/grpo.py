"""GRPO: rewards standardised within the group, every token of the batch weighted alike.

Shao et al., arXiv 2402.03300, with the token-mean aggregation of DAPO (arXiv 2503.14476): the mean over
each sequence would punish long wrong answers less a token, and so lengthen them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perilune.learn.advantages import standardised
from perilune.learn.algorithms.base import ClippedPolicyGradient, Group, StepContext
from perilune.learn.weights import WeightedGroup, rewards


class GRPO(ClippedPolicyGradient):
    """A = (r - mean) / (std + 1e-4)."""

    name: Literal["grpo"] = Field("grpo", description="which algorithm this is")

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        scores = rewards(group)
        return self.compared(group, scores, standardised(scores), context)
