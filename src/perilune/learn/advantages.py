"""How much better than its group an episode did. Rewards are float64[G]; NaN marks a failed verifier."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DEAD_STD = 1e-3
"""Below this spread rewards count as equal. Dividing by a smaller one would let a trivial difference (seven
rewards of 1 and one of 0.999) act at full strength."""

STD_EPSILON = 1e-4

Rewards = NDArray[np.float64]


def is_dead(rewards: Rewards) -> bool:
    """Whether a group has nothing to compare: fewer than two scored episodes, or equal rewards."""
    return not spread(rewards) >= DEAD_STD


def spread(rewards: Rewards) -> float:
    """Sample standard deviation (ddof=1) of the scored episodes; 0 for fewer than two."""
    scored = rewards[~np.isnan(rewards)]
    return float(scored.std(ddof=1)) if len(scored) > 1 else 0.0


def centred(rewards: Rewards) -> Rewards:
    """r - mean. A dead group, and an episode alone in its group, gets 0: there is nothing it beat."""
    if is_dead(rewards):
        return np.where(np.isnan(rewards), np.nan, 0.0)
    return np.asarray(rewards - np.nanmean(rewards))


def standardised(rewards: Rewards, epsilon: float = STD_EPSILON) -> Rewards:
    """(r - mean) / (std + epsilon), std with ddof=1 as verl and TRL have it."""
    return np.asarray(centred(rewards) / (spread(rewards) + epsilon))
