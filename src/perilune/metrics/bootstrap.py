"""Intervals by resampling problems.

Problems are resampled, never completions: completions of one problem are not independent evidence, and
resampling them with replacement biases pass@k downwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perilune.errors import RequestError

RESAMPLES = 10_000
LEVEL = 0.95
_CHUNK = 4_000_000  # indices drawn at once, 32 MB


class Interval(NamedTuple):
    """A mean over problems with the bounds of its percentile interval."""

    mean: float
    low: float
    high: float


def bootstrap_problems(
    values: Sequence[float] | NDArray[np.float64],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
) -> Interval:
    """Mean of one figure a problem, with the percentile interval over resampled sets of problems.

    Args:
        values: [problems], finite; for instance pass@k of each problem.
        seed: equal seeds and values give equal intervals.

    Raises:
        RequestError: when there is no value, or one is not finite.
    """
    figures = np.asarray(values, dtype=np.float64)
    if figures.ndim != 1 or len(figures) == 0:
        raise RequestError("no problems to average over")
    if not np.isfinite(figures).all():
        raise RequestError(f"problem {int(np.flatnonzero(~np.isfinite(figures))[0])} has no finite figure")
    rng = np.random.default_rng(seed)
    at_once = max(1, _CHUNK // len(figures))
    means = np.concatenate([
        figures[rng.integers(len(figures), size=(min(at_once, resamples - done), len(figures)))].mean(axis=1)
        for done in range(0, resamples, at_once)
    ])  # fmt: skip
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(figures.mean()), float(low), float(high))


def paired_difference(
    before: Mapping[str, float],
    after: Mapping[str, float],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
) -> Interval:
    """Mean of after - before over the same problems, by task id; pairing removes how hard each problem is.

    Raises:
        RequestError: when the two do not cover the same task ids, naming one that only one has.
    """
    odd = sorted(before.keys() ^ after.keys())
    if odd:
        side = "first" if odd[0] in before else "second"
        raise RequestError(
            f"task {odd[0]} is only in the {side} evaluation ({len(odd)} such tasks)",
            remedy="evaluate both on the same environment, split, seed and number of tasks",
        )
    tasks = sorted(before)
    differences = [after[task] - before[task] for task in tasks]
    return bootstrap_problems(differences, seed=seed, resamples=resamples, level=level)
