"""Rewards of the steps of a trace: potential-based shaping, and returns relative to their mean.

Shaping adds gamma Phi(after) - Phi(before) to the reward of each step (Ng, Harada and Russell 1999). If Phi
is 0 at the end, this adds -Phi(start) to every discounted return, whatever the actions, so the best policy
does not change. Therefore the potentials are clipped, not their differences, and the last potential is
replaced by 0.
"""

import math

import numpy as np
from numpy.typing import NDArray

StepValues = NDArray[np.float64]

PASS_THRESHOLD = 0.99
"""The reward from which an answer counts as right."""


def compute_shaping(potentials: StepValues, bounds: tuple[float, float], gamma: float = 1.0) -> StepValues:
    """Return float64[T]: gamma Phi(after) - Phi(before) of each step.

    Args:
        potentials: float64[T + 1], Phi before each step and at the end; the last one is replaced by 0.
        bounds: lowest and highest value of Phi.
    """
    phi = np.clip(potentials, *bounds).astype(np.float64)
    phi[-1] = 0.0
    return np.asarray(gamma * phi[1:] - phi[:-1])


def compute_centered_returns(
    rewards: StepValues, *, scale: float = 1.0, clip: float = math.inf
) -> StepValues:
    """Return float64[T]: clip((G - b) / scale), with G the return of each step and b their mean.

    For a single step, b is 0.
    """
    returns = np.cumsum(rewards[::-1])[::-1]
    baseline = returns.mean() if len(returns) > 1 else 0.0
    return np.clip((returns - baseline) / scale, -clip, clip)
