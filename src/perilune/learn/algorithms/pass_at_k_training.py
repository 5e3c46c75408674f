"""Pass@k training: an answer's advantage is its mean over all groups of k that could be drawn from n samples.

arXiv 2508.10751. A drawn group is right when it holds a right answer; its reward is standardised over all
C(n, k) groups, whose mean is R and whose deviation sqrt(R (1 - R)).
"""

from __future__ import annotations

from math import comb, sqrt
from typing import Literal

import numpy as np
from pydantic import Field

from perilune.learn.advantages import Rewards
from perilune.learn.algorithms.base import ClippedPolicyGradient, Group, StepContext
from perilune.learn.weights import WeightedGroup, rewards
from perilune.metrics.pass_at_k import pass_at_k


class PassAtKTraining(ClippedPolicyGradient):
    """A+ = (1 - R) / sd;  A- = (1 - R - C(wrong - 1, k - 1) / C(n - 1, k - 1)) / sd; their sum is 0."""

    name: Literal["pass_at_k_training"] = Field("pass_at_k_training", description="which algorithm this is")
    k: int = Field(4, ge=1, description="answers of which one must be right; at most samples")
    passes_at: float = Field(1.0, description="reward from which an answer is right")

    @property
    def least_samples(self) -> int:
        return max(self.k, 2)

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        scores = rewards(group)
        right = np.where(np.isnan(scores), np.nan, scores >= self.passes_at)
        advantages = self.advantages(right)
        return self.compared(group, scores, advantages, context, dead=not np.nansum(np.abs(advantages)))

    def advantages(self, right: Rewards) -> Rewards:
        """[G] from 1 (right), 0 (wrong) or NaN; all 0 when every group of k is right, or none is."""
        n, c = int((~np.isnan(right)).sum()), int(np.nansum(right))
        k = min(self.k, n)
        mean = pass_at_k(n, c, k) if n else 0.0
        deviation = sqrt(mean * (1 - mean))
        if deviation == 0:
            return np.where(np.isnan(right), np.nan, 0.0)
        all_wrong = comb(n - c - 1, k - 1) / comb(n - 1, k - 1)
        good, bad = (1 - mean) / deviation, (1 - mean - all_wrong) / deviation
        return np.where(np.isnan(right), np.nan, np.where(right == 1, good, bad))
