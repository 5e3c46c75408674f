"""REINFORCE++ with a baseline: centred within the group, then whitened over the batch.

Hu et al., arXiv 2501.03262. What divides is the spread of the centred rewards, not of the rewards: tasks that
are merely easy or hard do not widen it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from perilune.learn.advantages import centred
from perilune.learn.algorithms.base import Group, StepContext
from perilune.learn.algorithms.reinforce_pp import ReinforcePP
from perilune.learn.weights import WeightedGroup, rewards


class ReinforcePPBaseline(ReinforcePP):
    """A = (G - mean) / std over the batch's tokens, of rewards r - mean of the group."""

    name: Literal["reinforce_pp_baseline"] = Field(  # type: ignore[assignment]
        "reinforce_pp_baseline", description="which algorithm this is"
    )

    @property
    def least_samples(self) -> int:
        return 2

    def weight_groups(self, groups: Sequence[Group], context: StepContext) -> list[WeightedGroup]:
        scores = [rewards(group) for group in groups]
        return self.whiten(groups, scores, [np.asarray(centred(values)) for values in scores], context)
