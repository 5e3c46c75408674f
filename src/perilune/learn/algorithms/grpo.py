"""GRPO: rewards standardised within the group, every token of the batch weighted alike.

Shao et al., arXiv 2402.03300, with the token-mean aggregation of DAPO (arXiv 2503.14476): the mean over
each sequence would punish long wrong answers less a token, and so lengthen them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perilune.data.episode import Episode
from perilune.learn.advantages import is_dead, standardised
from perilune.learn.weights import GroupWeights, aggregate, rewards


def weights(group: Sequence[Episode], *, max_tokens: int, kl: float = 0.0) -> GroupWeights:
    """A = (r - mean) / (std + 1e-4); see `Algorithm`."""
    scores = rewards(group)
    advantages = standardised(scores)
    coefficient = np.where(np.isnan(scores), np.nan, kl)
    return GroupWeights(
        episodes=tuple(group),
        policy_gradient=aggregate(group, advantages, "token-mean"),
        reference_kl=aggregate(group, coefficient, "token-mean") if kl > 0 else None,
        advantages=advantages.astype(np.float32),
        dead=is_dead(scores),
    )
