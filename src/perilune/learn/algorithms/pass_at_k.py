"""Algorithms that optimize pass@k: the probability that at least one of k answers is right."""

from math import comb, sqrt
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from perilune.learn.advantages import Rewards, is_dead
from perilune.learn.algorithms.base import ClippedPolicyGradient, Group, StepContext
from perilune.learn.weights import Aggregation, WeightedGroup, rewards
from perilune.metrics.pass_at_k import pass_at_k


def sample_worth(right: bool, n: int, others_right: int, k: int) -> float:
    """Return k/n for a right answer, and k/n pass@(k-1) of the others for a wrong one."""
    return k / n * (1.0 if right else pass_at_k(n - 1, others_right, k - 1) if k > 1 else 0.0)


class PKPO(ClippedPolicyGradient):
    """A = n (worth - baseline); each sequence is summed and divided by the token limit.

    Walder and Karkhanis, arXiv 2505.15201. Of n samples, a right one has worth k/n and a wrong one k/n *
    pass@(k-1) of the other n - 1. The sum over the group has the gradient of pass@k, without bias. The
    baseline is k/n * pass@k of the other n - 1 samples, which adds no bias; with k = 1 this is RLOO.
    """

    takes_any_reward: ClassVar[bool] = False

    name: Literal["pkpo"] = Field("pkpo", description="name of the algorithm")
    k: int = Field(4, ge=1, description="k of pass@k; less than samples")
    passes_at: float = Field(1.0, description="lowest reward with which an answer counts as right")
    aggregation: Aggregation = Field("seq-mean-token-sum-norm", description="how token losses are averaged")

    @property
    def least_samples(self) -> int:
        return self.k + 1

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        scores = rewards(group)
        right = np.where(np.isnan(scores), np.nan, scores >= self.passes_at)
        return self.weight_tokens(group, scores, self.advantages(right), context, dead=is_dead(right))

    def advantages(self, right: Rewards) -> Rewards:
        """Return advantages [G] from 1 (right), 0 (wrong) or NaN; failures may reduce k."""
        n = int((~np.isnan(right)).sum())
        if is_dead(right):
            return np.where(np.isnan(right), np.nan, 0.0)
        k = min(self.k, n - 1)
        others = np.nansum(right) - np.nan_to_num(right)
        base = [k / n * pass_at_k(n - 1, int(c), k) for c in others]
        worths = [sample_worth(bool(r == 1), n, int(c), k) for r, c in zip(right, others, strict=True)]
        return np.where(np.isnan(right), np.nan, n * (np.array(worths) - base))


class PassAtKTraining(ClippedPolicyGradient):
    """A+ = (1 - R) / sd;  A- = (1 - R - C(wrong - 1, k - 1) / C(n - 1, k - 1)) / sd; their sum is 0.

    arXiv 2508.10751. An answer's advantage is its mean over all groups of k that can be drawn from n samples.
    A drawn group is right when it contains a right answer. Its reward is standardized over all C(n, k)
    groups, whose mean is R and whose standard deviation is sd = sqrt(R (1 - R)).
    """

    takes_any_reward: ClassVar[bool] = False

    name: Literal["pass_at_k_training"] = Field("pass_at_k_training", description="name of the algorithm")
    k: int = Field(4, ge=1, description="k of pass@k; at most samples")
    passes_at: float = Field(1.0, description="lowest reward with which an answer counts as right")

    @property
    def least_samples(self) -> int:
        return max(self.k, 2)

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        scores = rewards(group)
        right = np.where(np.isnan(scores), np.nan, scores >= self.passes_at)
        advantages = self.advantages(right)
        return self.weight_tokens(group, scores, advantages, context, dead=not np.nansum(np.abs(advantages)))

    def advantages(self, right: Rewards) -> Rewards:
        """Return advantages [G] from 1 (right), 0 (wrong) or NaN; 0 if all groups of k are equal."""
        n, c = int((~np.isnan(right)).sum()), int(np.nansum(right))
        k = min(self.k, n)
        mean = pass_at_k(n, c, k) if n else 0.0
        deviation = sqrt(mean * (1 - mean))
        if deviation == 0:
            return np.where(np.isnan(right), np.nan, 0.0)
        all_wrong = comb(n - c - 1, k - 1) / comb(n - 1, k - 1)
        good, bad = (1 - mean) / deviation, (1 - mean - all_wrong) / deviation
        return np.where(np.isnan(right), np.nan, np.where(right == 1, good, bad))
