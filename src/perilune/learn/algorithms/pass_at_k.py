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
    """Return the worth of an answer in `PKPO`.

    Args:
        n: number of scored answers of the group.
        others_right: number of right answers among the other n - 1.
    """
    return k / n * (1.0 if right else pass_at_k(n - 1, others_right, k - 1) if k > 1 else 0.0)


class PKPO(ClippedPolicyGradient):
    """A = n (worth - baseline); each sequence is summed and divided by the token limit.

    Walder and Karkhanis, arXiv 2505.15201. Among n samples, the worth of a right one is k/n, and that of a
    wrong one is k/n * pass@(k-1) of the other n - 1 samples. The sum over the group is an unbiased estimate
    of the gradient of pass@k. The baseline, k/n * pass@k of the other n - 1 samples, adds no bias. With k = 1
    this is RLOO.
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
        """Return advantages float64[G] from 1 (right), 0 (wrong) or NaN (failed). Failures may reduce k."""
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

    arXiv 2508.10751. From n samples, C(n, k) groups of k can be drawn. A drawn group has reward 1 if it
    contains a right answer, else 0. These rewards have mean R and standard deviation sd = sqrt(R (1 - R)),
    with which they are standardized. An answer's advantage is the mean over all drawn groups that contain it.
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
        """Return advantages float64[G] from 1 (right), 0 (wrong) or NaN (failed).

        They are 0 if all groups of k have the same reward.
        """
        n, c = int((~np.isnan(right)).sum()), int(np.nansum(right))
        k = min(self.k, n)
        mean = pass_at_k(n, c, k) if n else 0.0
        deviation = sqrt(mean * (1 - mean))
        if deviation == 0:
            return np.where(np.isnan(right), np.nan, 0.0)
        all_wrong = comb(n - c - 1, k - 1) / comb(n - 1, k - 1)
        good, bad = (1 - mean) / deviation, (1 - mean - all_wrong) / deviation
        return np.where(np.isnan(right), np.nan, np.where(right == 1, good, bad))
