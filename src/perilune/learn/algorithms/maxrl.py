"""MaxRL: rewards centred and divided by the group's mean, which climbs the log of the pass rate.

arXiv 2602.02710. With right-or-wrong rewards the expected gradient is that of log p, up to the finite group:
hard tasks weigh 1 / p, as in maximum likelihood.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from perilune.errors import WorkFailedError
from perilune.learn.advantages import centred, is_dead
from perilune.learn.algorithms.base import ClippedPolicyGradient, Group, StepContext
from perilune.learn.weights import Aggregation, WeightedGroup, rewards


class MaxRL(ClippedPolicyGradient):
    """A = (r - mean) / mean, each sequence summed over a constant length."""

    takes_any_reward: ClassVar[bool] = False

    name: Literal["maxrl"] = Field("maxrl", description="which algorithm this is")
    aggregation: Aggregation = Field(
        "seq-mean-token-sum-norm", description="over what a token's loss is averaged"
    )

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        scores = rewards(group)
        if np.nanmin(scores, initial=0.0) < 0:
            raise WorkFailedError(
                f"task {group[0].task_id} has a reward of {np.nanmin(scores):g}; maxrl divides by their mean",
                remedy="rewards from 0 upwards, or another algorithm",
            )
        advantages = centred(scores)
        if not is_dead(scores):
            advantages = advantages / np.nanmean(scores)
        return self.compared(group, scores, advantages, context)
