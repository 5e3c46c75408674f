"""Supervised fine-tuning: the mean cross-entropy of the tokens to imitate. Rewards are ignored."""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from perilune.learn.algorithms.base import Algorithm, Group, StepContext
from perilune.learn.weights import WeightedGroup, aggregate


class SFT(Algorithm):
    """Weight 1 on every unmasked token, averaged over the batch's tokens."""

    compares: ClassVar[Literal["group", "batch", "nothing"]] = "nothing"
    name: Literal["sft"] = Field("sft", description="name of the algorithm")

    def weight_group(self, group: Group, context: StepContext) -> WeightedGroup:
        scale = np.where([bool(episode.failure) for episode in group], np.nan, 1.0)
        kl = aggregate(group, scale * context.kl, "token-mean") if context.kl > 0 else None
        return WeightedGroup(
            tuple(group), cross_entropy=aggregate(group, scale, "token-mean"), reference_kl=kl
        )
