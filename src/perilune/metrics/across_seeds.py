"""Differences between arms over paired seeds: Student's t interval and Holm's correction.

A seed determines the cold start, the tasks and the sampling, so two arms with the same seed form a pair. An
interval over the tasks of one run does not cover other seeds; only a test over seeds supports a claim about a
method.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE_LEVEL = 0.95
MIN_SEEDS = 3  # pairs below which no claim is made
SIGNIFICANCE = 0.05  # a corrected p value below it supports a claim


@dataclass(frozen=True, slots=True)
class SeedComparison:
    """Difference between two arms: one value per seed, the t interval, and p before and after correction."""

    differences: tuple[float, ...]
    mean: float
    low: float
    high: float
    p: float
    p_corrected: float

    @property
    def conclusion(self) -> str:
        """ "higher", "lower", "no difference shown", or "too few seeds"."""
        if len(self.differences) < MIN_SEEDS:
            return "too few seeds"
        if self.p_corrected >= SIGNIFICANCE:
            return "no difference shown"
        return "higher" if self.mean > 0 else "lower"

    def describe(self, *, is_share: bool = True) -> str:
        """Return the conclusion with the difference; in percentage points for shares such as pass@1."""
        values = (self.mean, self.low, self.high)
        mean, low, high = (f"{100 * value:+.1f}" if is_share else f"{value:+.3g}" for value in values)
        mean = f"{mean} points" if is_share else mean
        if self.conclusion == "too few seeds":
            return f"too few seeds for a claim ({mean})"
        p = "p < 0.001" if self.p_corrected < 0.001 else f"p = {self.p_corrected:.2g}"
        return f"{self.conclusion} ({mean}, 95% interval {low} to {high}; corrected {p})"


def compare_over_seeds(differences: Mapping[str, Sequence[float]]) -> dict[str, SeedComparison]:
    """Test every comparison of a family with a paired t test, corrected together by Holm's method.

    Args:
        differences: by comparison, one value per seed.
    """
    p = {name: paired_p_value(values) for name, values in differences.items()}
    corrected = correct_p_values(p)
    return {
        name: SeedComparison(tuple(values), **t_interval(values), p=p[name], p_corrected=corrected[name])
        for name, values in differences.items()
    }


def t_interval(values: Sequence[float]) -> dict[str, float]:
    """Return mean and Student's t interval of one value per seed; one seed gives an infinite interval."""
    mean = fmean(values)
    if len(values) < 2:
        return {"mean": mean, "low": -math.inf, "high": math.inf}
    half = t_quantile((1 + CONFIDENCE_LEVEL) / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def paired_p_value(differences: Sequence[float]) -> float:
    """Return the two-sided p of the paired t test against a mean difference of 0; 1 for fewer than two seeds.

    Equal differences say nothing about their spread, so they get the p value of the sign test instead.
    """
    if len(differences) < 2:
        return 1.0
    mean, spread = fmean(differences), stdev(differences)
    if mean == 0 == spread:
        return 1.0
    if spread <= 1e-12 * abs(mean):
        return float(2 ** (1 - len(differences)))
    t = abs(mean) * math.sqrt(len(differences)) / spread
    return 2 * (1 - t_cdf(t, len(differences) - 1))


def correct_p_values(values: Mapping[str, float]) -> dict[str, float]:
    """Return p values by name after the step-down correction of Holm (1979)."""
    corrected: dict[str, float] = {}
    highest = 0.0
    for index, name in enumerate(sorted(values, key=lambda name: values[name])):
        highest = max(highest, min(1.0, values[name] * (len(values) - index)))
        corrected[name] = highest
    return corrected


def t_cdf(t: float, degrees: int) -> float:
    """Return Student's distribution function at `t` (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = 1.0, 0.0
    if degrees % 2:
        for k in range(1, degrees - 1, 2):
            total += term * cosine**k
            term *= (k + 1) / (k + 2)
        return 0.5 + (angle + sine * total) / math.pi
    for k in range(0, degrees - 1, 2):
        total += term * cosine**k
        term *= (k + 1) / (k + 2)
    return 0.5 + sine * total / 2


def t_quantile(probability: float, degrees: int) -> float:
    """Return the t at which Student's distribution reaches `probability`, for probabilities from 0.5."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, degrees) < probability else (low, middle)
    return high
