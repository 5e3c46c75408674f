"""Growth of the pass rate over rounds of filtering and training.

A round keeps right answers with probability a1 and wrong ones with a0. If the model then fits the kept
answers perfectly, the odds of the pass rate grow by the factor g = a1 / a0, so logit p grows by ln g per
round. Exponentiated-gradient reinforcement learning has g = exp(eta). With a perfect verifier g is infinite,
and only the fit limits the growth, which the measured g shows.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from perilune.errors import RequestError
from perilune.metrics.bootstrap import Interval, draw_problems, percentile_interval
from perilune.metrics.proportion import Z_95

_RESAMPLES = 2000


def rounds_to(p: float, goal: float, gain: float) -> float:
    """Return the rounds from pass rate `p` to `goal`; infinite if a round gains nothing."""
    return (_logit(goal) - _logit(p)) / math.log(gain) if gain > 1 else math.inf


def measured_gain(rates: Sequence[float]) -> float:
    """Return g of a series of pass rates, one per round: exp of the slope of logit p. 1 means no growth.

    Raises:
        RequestError: for fewer than two rates, or a rate of 0 or 1.
    """
    if len(rates) < 2 or not all(0 < rate < 1 for rate in rates):
        raise RequestError("a gain needs at least two pass rates, each above 0 and below 1")
    middle = (len(rates) - 1) / 2
    spread = math.fsum((i - middle) ** 2 for i in range(len(rates)))
    return math.exp(math.fsum((i - middle) * _logit(rate) for i, rate in enumerate(rates)) / spread)


def gain_interval(rounds: Sequence[Mapping[str, float]], *, seed: int = 0) -> Interval:
    """Return g of pass rates by task, one mapping per round, with an interval over resampled tasks.

    Every round uses the same drawn tasks, so the difficulty of tasks does not add to the variance. A mean
    rate of 0 or 1 is moved by half a task, because its logit is not finite.

    Raises:
        RequestError: for fewer than two rounds, or rounds with different tasks.
    """
    if len(rounds) < 2 or any(row.keys() != rounds[0].keys() for row in rounds):
        raise RequestError("a gain needs at least two rounds, evaluated on the same tasks")
    names = sorted(rounds[0])
    rates = np.array([[row[name] for name in names] for row in rounds])  # [rounds, tasks]
    edge = 0.5 / len(names)

    def gains(means: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> list[float]:
        bounded = np.clip(means, edge, 1 - edge)
        return [measured_gain(column.tolist()) for column in bounded.T]

    drawn = draw_problems(len(names), _RESAMPLES, seed)
    resampled = [gain for rows in drawn for gain in gains(rates[:, rows].mean(axis=2))]
    (mean,) = gains(rates.mean(axis=1, keepdims=True))
    return percentile_interval(mean, resampled)


def likelihood_ratio(kept_right: int, right: int, kept_wrong: int, wrong: int) -> Interval:
    """Return a1 / a0 of a verifier, measured on labelled samples, with the interval of Katz et al. (1978).

    Half a sample is added to each count, so a verifier without errors has a finite ratio that grows with the
    number of samples.

    Raises:
        RequestError: when there is no right or no wrong sample.
    """
    if not right or not wrong:
        raise RequestError("a likelihood ratio needs right and wrong samples")
    a, n, b, m = kept_right + 0.5, right + 1.0, kept_wrong + 0.5, wrong + 1.0
    ratio = (a / n) / (b / m)
    spread = Z_95 * math.sqrt(1 / a - 1 / n + 1 / b - 1 / m)
    return Interval(ratio, ratio * math.exp(-spread), ratio * math.exp(spread))


def _logit(p: float) -> float:
    return math.log(p / (1 - p))
