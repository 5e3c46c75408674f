"""Rewards of the steps of a trace: potential-based shaping, and returns against their mean.

Shaping adds gamma Phi(after) - Phi(before) to the reward of each step (Ng, Harada and Russell 1999). With
Phi = 0 at the end it adds -Phi(start) to every discounted return, whatever the actions, so the best policy
stays the best. Therefore the potential is bounded, never the difference, and the given potential of the end
is replaced by 0.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Steps = NDArray[np.float64]

PASS_THRESHOLD = 0.99
"""Utility from which an answer counts as right."""


def shaping(potentials: Steps, bounds: tuple[float, float], gamma: float = 1.0) -> Steps:
    """float64[T]: gamma Phi(after) - Phi(before) of each step, from float64[T + 1] of Phi, 0 at the end."""
    phi = np.clip(potentials, *bounds).astype(np.float64)
    phi[-1] = 0.0
    return np.asarray(gamma * phi[1:] - phi[:-1])


def centered_returns(rewards: Steps, gamma: float = 1.0, scale: float = 1.0, clip: float = math.inf) -> Steps:
    """float64[T]: clip((G - b) / scale) with G the return of each step, b their mean; b is 0 for one step."""
    returns = np.zeros(len(rewards))
    later = 0.0
    for t in range(len(rewards))[::-1]:
        later = returns[t] = rewards[t] + gamma * later
    baseline = returns.mean() if len(returns) > 1 else 0.0
    return np.clip((returns - baseline) / scale, -clip, clip)
