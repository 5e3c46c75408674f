"""Dr. GRPO: rewards centred within the group, token sums over a constant length.

Liu et al., arXiv 2503.20783: without the division by the group's spread every task counts alike, and
without the division by the response's length so does every token. Up to a constant this is RLOO.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perilune.data.episode import Episode
from perilune.learn.advantages import centred, is_dead
from perilune.learn.weights import Aggregation, GroupWeights, aggregate, rewards


def weights(group: Sequence[Episode], *, max_tokens: int, kl: float = 0.0) -> GroupWeights:
    """A = r - mean, each sequence summed and divided by `max_tokens`; see `Algorithm`."""
    scores = rewards(group)
    advantages = centred(scores)
    mode: Aggregation = "seq-mean-token-sum-norm"
    coefficient = np.where(np.isnan(scores), np.nan, kl)
    return GroupWeights(
        episodes=tuple(group),
        policy_gradient=aggregate(group, advantages, mode, constant=max_tokens),
        reference_kl=aggregate(group, coefficient, mode, constant=max_tokens) if kl > 0 else None,
        advantages=advantages.astype(np.float32),
        dead=is_dead(scores),
    )
