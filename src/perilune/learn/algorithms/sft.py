"""Supervised fine-tuning: the mean cross-entropy of the tokens to imitate. Rewards are not looked at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perilune.data.episode import Episode
from perilune.learn.weights import GroupWeights, aggregate


def weights(group: Sequence[Episode], *, max_tokens: int = 0, kl: float = 0.0) -> GroupWeights:
    """Weight 1 on every unmasked token, mean over the batch's tokens; see `Algorithm`."""
    scale = np.where([bool(episode.failure) for episode in group], np.nan, 1.0)
    coefficient = scale * kl
    return GroupWeights(
        episodes=tuple(group),
        cross_entropy=aggregate(group, scale, "token-mean"),
        reference_kl=aggregate(group, coefficient, "token-mean") if kl > 0 else None,
    )
