"""Whether a few seeds can tell two arms apart: paired t intervals, and Holm's correction for many arms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

LEVEL = 0.95


def interval(values: Sequence[float], level: float = LEVEL) -> dict[str, float]:
    """Mean and t interval of one figure a seed; of a single seed there is no interval but the whole line."""
    mean = fmean(values)
    if len(values) < 2:
        return {"mean": mean, "low": -math.inf, "high": math.inf}
    half = quantile((1 + level) / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def p_value(differences: Sequence[float]) -> float:
    """Of both sides, that differences between paired seeds are 0 on average; 1 with fewer than two."""
    if len(differences) < 2:
        return 1.0
    mean, spread = fmean(differences), stdev(differences)
    if spread == 0:
        return float(mean == 0)
    t = abs(mean) * math.sqrt(len(differences)) / spread
    return 2 * (1 - cumulative(t, len(differences) - 1))


def holm(values: Mapping[str, float]) -> dict[str, float]:
    """P values by name, as Holm (1979) corrects them for their number."""
    corrected: dict[str, float] = {}
    highest = 0.0
    for place, name in enumerate(sorted(values, key=lambda name: values[name])):
        highest = max(highest, min(1.0, values[name] * (len(values) - place)))
        corrected[name] = highest
    return corrected


def cumulative(t: float, degrees: int) -> float:
    """Student's distribution function (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
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


def quantile(probability: float, degrees: int) -> float:
    """The t below which Student's distribution has `probability`, which is at least a half."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if cumulative(middle, degrees) < probability else (low, middle)
    return high
