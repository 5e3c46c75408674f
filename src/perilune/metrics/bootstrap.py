"""Confidence intervals by resampling problems.

Only problems are resampled, not completions. Completions of one problem are not independent, and resampling
them with replacement biases pass@k downwards.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perilune.errors import RequestError
from perilune.metrics.across_seeds import CONFIDENCE_LEVEL

RESAMPLES = 10_000
_CHUNK_INDICES = 4_000_000  # indices drawn at once, 32 MB


class Interval(NamedTuple):
    """A mean over problems with the bounds of its percentile interval."""

    mean: float
    low: float
    high: float

    def __format__(self, form: str) -> str:
        """Return "mean (low to high)", each number in the format `form`."""
        return f"{self.mean:{form}} ({self.low:{form}} to {self.high:{form}})"

    def figures(self, name: str) -> dict[str, float]:
        """Return the figures `name`, `name`/low and `name`/high of a line of metrics.jsonl."""
        return {name: self.mean, f"{name}/low": self.low, f"{name}/high": self.high}


def bootstrap_problems(
    values: Sequence[float] | NDArray[np.float64], *, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """Return the mean over problems, with the percentile interval over resampled sets of problems.

    Args:
        values: [problems], one finite value per problem, for instance pass@k.
        seed: equal seeds and values give equal intervals.

    Raises:
        RequestError: when there are no values, or one is not finite.
    """
    figures = np.asarray(values, dtype=np.float64)
    if figures.ndim != 1 or len(figures) == 0:
        raise RequestError("there are no problems to average over")
    if not np.isfinite(figures).all():
        raise RequestError(f"the value of problem {int(np.argmin(np.isfinite(figures)))} is not finite")
    drawn = draw_problems(len(figures), resamples, seed)
    means = np.concatenate([figures[indices].mean(axis=1) for indices in drawn])
    return percentile_interval(float(figures.mean()), means)


def percentile_interval(mean: float, resampled: Sequence[float] | NDArray[np.float64]) -> Interval:
    """Return `mean` with the 95% percentile interval of the resampled values, [N]."""
    low, high = np.quantile(resampled, [(1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2])
    return Interval(mean, float(low), float(high))


def draw_problems(problems: int, resamples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield `resamples` resampled sets of problems, in blocks of indices int64[N, problems]."""
    rng = np.random.default_rng(seed)
    block = max(1, _CHUNK_INDICES // problems)
    for done in range(0, resamples, block):
        yield rng.integers(problems, size=(min(block, resamples - done), problems))


def bootstrap_ratio(parts: Sequence[float], wholes: Sequence[float], *, seed: int = 0) -> Interval:
    """Return sum(parts) / sum(wholes), such as a word error rate, with the percentile interval over problems.

    Source: Bisani and Ney, Bootstrap estimates for confidence intervals in ASR, ICASSP 2004.

    Args:
        parts, wholes: [problems], such as the errors and the words of each utterance; wholes are positive.

    Raises:
        RequestError: when there are no problems, a whole is not positive, or a value is not finite.
    """
    above, below = np.asarray(parts, dtype=np.float64), np.asarray(wholes, dtype=np.float64)
    finite = np.isfinite(above).all() and np.isfinite(below).all()
    if not len(below) or above.shape != below.shape or not (below > 0).all() or not finite:
        raise RequestError("a ratio needs problems, each with a finite part and a finite, positive whole")
    drawn = draw_problems(len(below), RESAMPLES, seed)
    ratios = np.concatenate([above[rows].sum(axis=1) / below[rows].sum(axis=1) for rows in drawn])
    return percentile_interval(float(above.sum() / below.sum()), ratios)


def paired_difference(before: Mapping[str, float], after: Mapping[str, float], *, seed: int = 0) -> Interval:
    """Return the mean of after - before over the same tasks, by id. Pairing removes the tasks' difficulty.

    Raises:
        RequestError: when the two evaluations have different task ids, naming one of them.
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
    return bootstrap_problems(differences, seed=seed)
