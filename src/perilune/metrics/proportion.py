"""A proportion with its confidence interval."""

from __future__ import annotations

import math

from perilune.errors import RequestError
from perilune.metrics.bootstrap import Interval

Z = 1.959963984540054  # of the standard normal, two-sided 95%


def wilson(successes: float, trials: int) -> Interval:
    """The proportion with the interval of Wilson (1927), which is valid near 0 and 1 and for few trials.

    Successes may include halves, for draws.

    Raises:
        RequestError: when there was no trial.
    """
    if trials < 1:
        raise RequestError("a proportion needs at least one trial")
    share = successes / trials
    spread = Z * math.sqrt(share * (1 - share) / trials + Z * Z / (4 * trials * trials))
    middle = share + Z * Z / (2 * trials)
    scale = 1 + Z * Z / trials
    low = (middle - spread) / scale if successes > 0 else 0.0  # exact at 0 and 1, without rounding errors
    high = (middle + spread) / scale if successes < trials else 1.0
    return Interval(share, low, high)
