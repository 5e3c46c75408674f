"""PKPO: climbs pass@k, the chance that k answers hold a right one.

Walder and Karkhanis, arXiv 2505.15201. Of n samples, c right, a right one is worth k/n and a wrong one
k/n * pass@(k-1) of the other n - 1: their sum over the group has the gradient of pass@k, without bias. What
the others alone would be worth, k/n * pass@k of n - 1, is taken off: it cannot bias, and k = 1 is RLOO.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from perilune.learn.advantages import Rewards, is_dead
from perilune.learn.algorithms.base import ClippedPolicyGradient, Group, StepContext
from perilune.learn.weights import Aggregation, WeightedGroup, rewards
from perilune.metrics.pass_at_k import pass_at_k


def worth(right: bool, n: int, others_right: int, k: int) -> float:
    """k/n for a right answer, k/n pass@(k-1) of the others for a wrong one."""
    return k / n * (1.0 if right else pass_at_k(n - 1, others_right, k - 1) if k > 1 else 0.0)


class PKPO(ClippedPolicyGradient):
    """A = n (worth - what the others are worth), each sequence summed over a constant length."""

    takes_any_reward: ClassVar[bool] = False

    name: Literal["pkpo"] = Field("pkpo", description="which algorithm this is")
    k: int = Field(4, ge=1, description="answers of which one must be right; fewer than samples")
    passes_at: float = Field(1.0, description="reward from which an answer is right")
    aggregation: Aggregation = Field(
        "seq-mean-token-sum-norm", description="over what a token's loss is averaged"
    )

    @property
    def least_samples(self) -> int:
        return self.k + 1

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        scores = rewards(group)
        right = np.where(np.isnan(scores), np.nan, scores >= self.passes_at)
        return self.compared(group, scores, self.advantages(right), context, dead=is_dead(right))

    def advantages(self, right: Rewards) -> Rewards:
        """[G] from 1 (right), 0 (wrong) or NaN; a group that failures made too small compares with fewer."""
        n = int((~np.isnan(right)).sum())
        if is_dead(right):
            return np.where(np.isnan(right), np.nan, 0.0)
        k = min(self.k, n - 1)
        others = np.nansum(right) - np.nan_to_num(right)
        base = [k / n * pass_at_k(n - 1, int(c), k) for c in others]
        found = [worth(bool(r == 1), n, int(c), k) for r, c in zip(right, others, strict=True)]
        return np.where(np.isnan(right), np.nan, n * (np.array(found) - base))
