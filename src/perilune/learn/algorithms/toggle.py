"""Toggle: phases that reward only short right answers alternate with phases that reward all right answers.

Kimi K2.5, arXiv 2602.02276. In a short phase r becomes r * 1[group's mean < threshold or length <= budget],
so length matters only for tasks that are solved often. A task's budget is a percentile of the lengths of its
right answers, in the first group that has right answers. Later groups do not change the budget. The paper's
constants are not published.
"""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from perilune.learn.advantages import Rewards, standardized
from perilune.learn.algorithms.base import ClippedPolicyGradient, Group, StepContext
from perilune.learn.weights import WeightedGroup, rewards


class Toggle(ClippedPolicyGradient):
    """GRPO on toggled rewards. The first phase rewards short answers."""

    takes_any_reward: ClassVar[bool] = False

    name: Literal["toggle"] = Field("toggle", description="name of the algorithm")
    period: int = Field(
        10,
        ge=1,
        description="steps per phase. Phases that reward only short right answers alternate with phases"
        " that reward all right answers",
    )
    threshold: float = Field(
        0.5, ge=0, le=1, description="lowest mean reward of a group at which a short phase considers length"
    )
    percentile: float = Field(
        50.0,
        ge=0,
        le=100,
        description="a task's length budget in short phases is this percentile of the lengths of its"
        " right answers",
    )
    passes_at: float = Field(1.0, description="lowest reward with which an answer counts as right")

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        scores = rewards(group)
        lengths = np.array([episode.loss_mask.sum() for episode in group])
        budgets = context.memory.setdefault("budgets", {})
        correct = lengths[np.nan_to_num(scores, nan=-np.inf) >= self.passes_at]
        if group and len(correct):
            budgets.setdefault(group[0].task_id, float(np.percentile(correct, self.percentile)))
        budget = budgets.get(group[0].task_id, np.inf) if group else np.inf
        scores = self.toggle_rewards(scores, lengths, budget, context.step)
        return self.weight_tokens(group, scores, standardized(scores), context)

    def toggle_rewards(self, scores: Rewards, lengths: np.ndarray, budget: float, step: int) -> Rewards:
        """Return the rewards in the phase of `step`. The budget of an unsolved task is infinite."""
        short = step // self.period % 2 == 0
        if not short or np.isnan(scores).all() or np.nanmean(scores) < self.threshold:
            return scores
        return np.where(lengths <= budget, scores, scores * 0.0)
