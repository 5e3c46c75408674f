"""Spearman's rank correlation with its interval, and its ceiling for noisy values."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perilune.metrics.bootstrap import Interval, percentile_interval

Figures = NDArray[np.float64]

RESAMPLES = 1000


def spearman(a: Figures, b: Figures) -> float | None:
    """Return Spearman's rank correlation, with mean ranks for ties; None if `a` or `b` does not vary."""
    if not len(a):
        return None
    x, y = _ranks(a), _ranks(b)
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale > 0 else None


def spearman_over_problems(
    pairs: Sequence[tuple[Figures, Figures]], *, seed: int = 0, resamples: int = RESAMPLES
) -> Interval | None:
    """Return Spearman's correlation over all items, with the percentile interval over resampled problems.

    Args:
        pairs: for each problem the two values of each of its n items, float64[n] each; n may be 0.

    Returns:
        None if the correlation is undefined.
    """
    correlation = spearman(*_concatenate(pairs)) if pairs and sum(len(a) for a, _ in pairs) > 1 else None
    if correlation is None:
        return None
    rng = np.random.default_rng(seed)
    drawn = ([pairs[index] for index in rng.integers(len(pairs), size=len(pairs))] for _ in range(resamples))
    values = [value for sample in drawn if (value := spearman(*_concatenate(sample))) is not None]
    return percentile_interval(correlation, values or [correlation])


def correlation_ceiling(half: Figures, other_half: Figures) -> float | None:
    """Return the correlation of perfect values with the mean of two noisy halves.

    It is sqrt(2 r / (1 + r)), where r is the correlation of the halves (Spearman-Brown); None if r is
    undefined.
    """
    r = spearman(half, other_half)
    return None if r is None else math.sqrt(max(0.0, 2 * r / (1 + r))) if r > -1 else 0.0


def _concatenate(pairs: Sequence[tuple[Figures, Figures]]) -> tuple[Figures, Figures]:
    return np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])


def _ranks(values: Figures) -> Figures:
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[index], dtype=np.float64)
