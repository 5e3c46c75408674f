"""Detects overoptimisation: the gold score as a function of the distance from the initial policy.

A policy that is optimized for a proxy moves a distance d = sqrt(KL(policy || initial)) and gains a gold score
R that is not trained on. Gao et al. (arXiv 2210.10760) found for best-of-n and for reinforcement learning

    best of n   R(d) = d (alpha - beta d)        peak at d* = alpha / (2 beta),        R* = alpha^2 / (4 beta)
    RL          R(d) = d (alpha - beta log d)    peak at d* = exp(alpha / beta - 1),   R* = beta d*

The distances of both laws are not comparable. Sums use `math.fsum`, so figures do not depend on a kernel.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

from perilune.errors import RequestError
from perilune.metrics.across_seeds import t_quantile
from perilune.metrics.proportion import Z_95

Law = Literal["best_of_n", "rl"]

MIN_FIT_POINTS = 8  # points before a law is fitted
SLOPE_WINDOW = 16  # points of the slope, once there are as many
MIN_SLOPE_POINTS = 12  # points before a slope is computed
RISE_STEPS = 3  # consecutive steps with a significant rise before its end can raise the alarm
STOP_SHARE = 0.8  # stop at this share of the fitted peak, where the gold score is flat and the fit uncertain


class Slope(NamedTuple):
    """Slope of a fitted line with its 95% interval (independent normal errors of equal variance)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class GoldFit:
    """A fitted law.

    Attributes:
        alpha, beta: coefficients; `beta_low` is the lower bound of beta's 95% interval.
        peak: d*, where the gold score is largest; infinite without a peak.
        gain: R*, above the initial score.
        points: number of points of the fit.
    """

    law: Law
    alpha: float
    beta: float
    beta_low: float
    points: int

    @property
    def peak(self) -> float:
        if self.beta <= 0:
            return math.inf
        if self.law == "best_of_n":
            return self.alpha / (2 * self.beta)
        return math.exp(min(self.alpha / self.beta - 1, 700.0))

    @property
    def gain(self) -> float:
        if self.beta <= 0:
            return math.inf
        return self.alpha**2 / (4 * self.beta) if self.law == "best_of_n" else self.beta * self.peak


def best_of_n_kl(n: int) -> float:
    """Return KL(best-of-n || base) in nats: log n - (n - 1) / n. Exact without ties, else an upper bound.

    Raises:
        RequestError: for n < 1.
    """
    if n < 1:
        raise RequestError(f"best-of-n needs n of at least 1, not {n}")
    return math.log(n) - (n - 1) / n


def fit_gold(distances: Sequence[float], gains: Sequence[float], law: Law = "rl") -> GoldFit | None:
    """Fit a law to gold scores relative to the initial one; None with too few points.

    Least squares of R / d on (1, -d) or (1, -log d) with weights d^2. The RL law is fitted only to d > 1,
    because its slope is unbounded near 0.
    """
    nearest = 1.0 if law == "rl" else 0.0
    kept = [(d, gain) for d, gain in zip(distances, gains, strict=True) if d > nearest]
    if len(kept) < MIN_FIT_POINTS:
        return None
    # Weights d^2 for R / d are equal weights for R, with columns d and -d^2, or d and -d log d.
    first = [d for d, _ in kept]
    second = [-d * (d if law == "best_of_n" else math.log(d)) for d, _ in kept]
    aa, ab, bb = _dot(first, first), _dot(first, second), _dot(second, second)
    ay, by = _dot(first, [y for _, y in kept]), _dot(second, [y for _, y in kept])
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:  # the distances hardly differ
        return None
    alpha = (bb * ay - ab * by) / determinant
    beta = (aa * by - ab * ay) / determinant
    residuals = [y - alpha * a - beta * b for (_, y), a, b in zip(kept, first, second, strict=True)]
    variance = _dot(residuals, residuals) / (len(kept) - 2)
    beta_low = beta - Z_95 * math.sqrt(variance * aa / determinant)
    return GoldFit(law, alpha, beta, beta_low, len(kept))


def fit_slope(values: Sequence[float]) -> Slope:
    """Fit a line to evenly spaced values; the slope is per step.

    Raises:
        RequestError: for fewer than three values.
    """
    n = len(values)
    if n < 3:
        raise RequestError(f"a slope needs at least 3 values, not {n}")
    middle, mean = (n - 1) / 2, math.fsum(values) / n
    spread = math.fsum((i - middle) ** 2 for i in range(n))
    value = math.fsum((i - middle) * y for i, y in enumerate(values)) / spread
    residual = math.fsum((y - mean - value * (i - middle)) ** 2 for i, y in enumerate(values))
    error = t_quantile(0.975, n - 2) * math.sqrt(residual / (n - 2) / spread)
    return Slope(value, value - error, value + error)


class OveroptimisationWatch:
    """Watches the gold score step by step, and recommends when to stop.

    It recommends to stop when the fitted law has a peak (beta's interval is above 0) and d reaches 0.8 of it,
    or when the interval of the gold slope includes 0 after three consecutive steps above 0. The second
    condition also raises the alarm: the gold score no longer rises significantly. The slope is over the last
    `window` steps, fewer at the beginning. A fall much shorter than a window is found late, and a rise
    smaller than the noise of a window is not found.
    """

    def __init__(self, *, window: int = SLOPE_WINDOW) -> None:
        self._window = window
        self._steps: list[int] = []
        self._distances: list[float] = []
        self._gold: list[float] = []
        self._rising = 0  # consecutive steps
        self._has_risen = False
        self.alarm: int | None = None  # step of the first alarm
        self.recommended_stop: int | None = None

    def observe(self, step: int, kl: float, gold: float) -> dict[str, float]:
        """Add one step's KL(policy || initial), in nats per episode, and its mean gold score.

        Returns:
            distance; gold_slope, gold_slope_low, gold_slope_high (per step) once there are enough steps;
            gold_peak (fitted d*) if the law has a peak; overoptimisation_alarm and stop_recommended, 0 or 1.
        """
        self._steps.append(step)
        self._distances.append(math.sqrt(max(kl, 0.0)))
        self._gold.append(gold)
        figures = {"distance": self._distances[-1]}
        crossed = False
        if len(self._gold) >= min(MIN_SLOPE_POINTS, self._window):
            recent = fit_slope(self._gold[-self._window :])
            figures |= {
                "gold_slope": recent.value,
                "gold_slope_low": recent.low,
                "gold_slope_high": recent.high,
            }
            self._rising = self._rising + 1 if recent.low > 0 else 0
            self._has_risen = self._has_risen or self._rising >= RISE_STEPS
            crossed = self._has_risen and recent.low <= 0
        fit = self.fit()
        near_peak = False
        if fit is not None and fit.beta_low > 0:
            figures["gold_peak"] = fit.peak
            near_peak = self._distances[-1] >= STOP_SHARE * fit.peak
        if crossed and self.alarm is None:
            self.alarm = step
        if (crossed or near_peak) and self.recommended_stop is None:
            self.recommended_stop = step
        figures["overoptimisation_alarm"] = float(self.alarm is not None)
        figures["stop_recommended"] = float(self.recommended_stop is not None)
        return figures

    def fit(self) -> GoldFit | None:
        """Return the law fitted to all steps so far, with gains relative to the mean of the first three."""
        start = self._gold[:3]
        if not start:
            return None
        base = fmean(start)
        return fit_gold(self._distances, [gold - base for gold in self._gold])


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))
