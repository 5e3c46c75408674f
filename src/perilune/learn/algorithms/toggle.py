"""Toggle: phases in which only short right answers count, in turn with phases in which all do.

Kimi K2.5, arXiv 2602.02276. In a short phase r becomes r * 1[group's mean < threshold or length <= budget]: a
task is pressed for length only once it is solved often. A task's budget is a percentile of the lengths of its
right answers, taken the first time there are any and then fixed. The paper's constants are not published.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from perilune.learn.advantages import Rewards, standardised
from perilune.learn.algorithms.base import ClippedPolicyGradient, Group, StepContext
from perilune.learn.weights import WeightedGroup, rewards


class Toggle(ClippedPolicyGradient):
    """GRPO on toggled rewards, short phase first."""

    takes_any_reward: ClassVar[bool] = False

    name: Literal["toggle"] = Field("toggle", description="which algorithm this is")
    period: int = Field(10, ge=1, description="steps of each phase")
    threshold: float = Field(0.5, ge=0, le=1, description="mean reward of a group from which length counts")
    percentile: float = Field(50.0, ge=0, le=100, description="of right answers' lengths, the budget")
    passes_at: float = Field(1.0, description="reward from which an answer is right")

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        scores = rewards(group)
        lengths = np.array([episode.loss_mask.sum() for episode in group])
        budgets = context.memory.setdefault("budgets", {})
        correct = lengths[np.nan_to_num(scores, nan=-np.inf) >= self.passes_at]
        if group and len(correct):
            budgets.setdefault(group[0].task_id, float(np.percentile(correct, self.percentile)))
        budget = budgets.get(group[0].task_id, np.inf) if group else np.inf
        toggled = self.toggled(scores, lengths, budget, context.step)
        return self.compared(group, toggled, standardised(toggled), context)

    def toggled(self, scores: Rewards, lengths: np.ndarray, budget: float, step: int) -> Rewards:
        """The rewards of a phase; a budget of infinity is that of a task never solved."""
        short = step // self.period % 2 == 0
        if not short or np.isnan(scores).all() or np.nanmean(scores) < self.threshold:
            return scores
        return np.where(lengths <= budget, scores, scores * 0.0)
