"""Proportions and pass rates with their confidence intervals."""

import math
from collections.abc import Iterable, Mapping, Sequence

from perilune.errors import RequestError
from perilune.metrics.bootstrap import Interval, bootstrap_problems, paired_difference
from perilune.metrics.pass_at_k import pass_at_k

Z_95 = 1.959963984540054  # of the standard normal, two-sided 95%


def wilson_interval(successes: float, trials: int) -> Interval:
    """Return the proportion with Wilson's interval (1927), which is valid near 0 and 1 and for few trials.

    Successes may include halves, for draws.

    Raises:
        RequestError: when there was no trial.
    """
    if trials < 1:
        raise RequestError("a proportion needs at least one trial")
    share = successes / trials
    spread = Z_95 * math.sqrt(share * (1 - share) / trials + Z_95 * Z_95 / (4 * trials * trials))
    middle = share + Z_95 * Z_95 / (2 * trials)
    scale = 1 + Z_95 * Z_95 / trials
    low = (middle - spread) / scale if successes > 0 else 0.0  # exact at 0 and 1, without rounding errors
    high = (middle + spread) / scale if successes < trials else 1.0
    return Interval(share, low, high)


def pass_rate_interval(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Return the mean of pass rates, one per problem, with the percentile interval over resampled problems.

    If all are equal, resampling shows no spread, and the interval is Wilson's with one trial per problem.
    Equal rewards outside [0, 1] are no pass rates, and keep the interval without spread.

    Raises:
        RequestError: as `bootstrap_problems`.
    """
    interval = bootstrap_problems(values, seed=seed)
    return wilson_interval(sum(values), len(values)) if 0 <= min(values) == max(values) <= 1 else interval


def pass_rate_change(before: Mapping[str, float], after: Mapping[str, float], *, seed: int = 0) -> Interval:
    """Return the mean change of pass rates over the same tasks, by id; its interval is `paired_difference`'s.

    If all tasks change equally, resampling shows no spread. The bounds then allow for a share of other tasks
    that fall from 1 to 0 or rise from 0 to 1: the upper bound of Wilson's interval for none of n.

    Raises:
        RequestError: as `paired_difference`.
    """
    change = paired_difference(before, after, seed=seed)
    if len({after[task] - before[task] for task in before}) > 1:
        return change
    share = wilson_interval(0, len(before)).high
    return Interval(
        change.mean, change.mean - share * (change.mean + 1), change.mean + share * (1 - change.mean)
    )


def pass_at_k_change(
    before: Iterable[tuple[str, int, int]], after: Iterable[tuple[str, int, int]], k: int
) -> tuple[Interval, int] | None:
    """Return the change of pass@k over the common tasks, and their number; None if there are none.

    Args:
        before, after: (task, scored answers, right answers). Tasks of fewer than k are left out.
    """
    rates = [{task: pass_at_k(n, right, k) for task, n, right in rows if n >= k} for rows in (before, after)]
    shared = rates[0].keys() & rates[1].keys()
    if not shared:
        return None
    return pass_rate_change(*({task: side[task] for task in shared} for side in rates)), len(shared)
