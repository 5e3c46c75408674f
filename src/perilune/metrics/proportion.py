"""A share of successes, with its interval."""

from __future__ import annotations

import math

from perilune.metrics.bootstrap import Interval

Z = 1.959963984540054  # of the standard normal, two-sided 95%


def wilson(successes: float, trials: int) -> Interval:
    """The share, with the score interval of Wilson (1927), which holds near 0 and 1 and for few trials.

    Successes may be halves (draws); no trials give the interval from 0 to 1.
    """
    if trials == 0:
        return Interval(math.nan, 0.0, 1.0)
    share = successes / trials
    spread = Z * math.sqrt(share * (1 - share) / trials + Z * Z / (4 * trials * trials))
    middle = share + Z * Z / (2 * trials)
    scale = 1 + Z * Z / trials
    return Interval(share, max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale))
