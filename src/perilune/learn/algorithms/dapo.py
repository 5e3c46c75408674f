"""DAPO: GRPO with a wider clip upwards, groups that teach nothing replaced, and a soft limit of length.

Yu et al., arXiv 2503.14476: clip-higher, dynamic sampling, token mean over the batch, overlong shaping.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from perilune.learn.advantages import is_dead, standardised
from perilune.learn.algorithms.base import ClippedPolicyGradient, Group, StepContext
from perilune.learn.weights import WeightedGroup, rewards


class DAPO(ClippedPolicyGradient):
    """GRPO's advantages of r + the length penalty; dead by r alone, refilled from new tasks."""

    name: Literal["dapo"] = Field("dapo", description="which algorithm this is")
    max_refills: int = Field(10, ge=0, description="rounds of new tasks for groups with equal rewards")
    overlong_buffer: float = Field(
        0.2, ge=0, lt=1, description="last share of max_tokens, over which length costs; 0 is off"
    )
    overlong_penalty: float = Field(1.0, ge=0, description="what an answer of max_tokens loses")

    @property
    def refills(self) -> int:
        return self.max_refills

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        scores = rewards(group)
        lengths = np.array([episode.loss_mask.sum() for episode in group], np.float64)
        shaped = scores + self.overlong(lengths, context.max_tokens)
        # Where only the penalty differs, dividing by its spread would let it act at full strength.
        advantages = np.where(np.isnan(scores), np.nan, 0.0) if is_dead(scores) else standardised(shaped)
        return self.compared(group, scores, advantages, context)

    def overlong(self, lengths: np.ndarray, max_tokens: int) -> np.ndarray:
        """min(0, -penalty (L - (max - buffer)) / buffer) of each length (eq. 13)."""
        buffer = self.overlong_buffer * max_tokens
        if buffer == 0:
            return np.zeros(len(lengths))
        return np.minimum(0.0, -self.overlong_penalty * (lengths - (max_tokens - buffer)) / buffer)
