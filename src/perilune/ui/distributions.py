"""Histograms of answer lengths and of pass rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from perilune.ui.attempt import Attempt
from perilune.ui.comparisons import Evaluation
from perilune.ui.episodes import RIGHT

MOST_BINS = 40
RATE_BINS = 20


@dataclass(frozen=True, slots=True)
class LengthCounts:
    """Answers by length in one evaluation."""

    label: str
    right: list[int]
    wrong: list[int]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens, in bins that all evaluations share; wrong answers count below 0 in `domain`."""

    centers: list[float] = field(default_factory=list)
    width: float = 1.0
    domain: tuple[float, float] = (0.0, 1.0)
    evaluations: list[LengthCounts] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RateCounts:
    """Tasks by share of right samples in one evaluation."""

    label: str
    counts: list[int]


@dataclass(frozen=True, slots=True)
class Rates:
    """Numbers of tasks by share of right samples."""

    values: list[float] = field(default_factory=list)
    width: float = 1.0
    evaluations: list[RateCounts] = field(default_factory=list)


def lengths_of(evaluated: Sequence[tuple[str, Attempt]]) -> Lengths:
    """Lengths of the sampled answers of each (label, attempt)."""
    samples: list[tuple[str, list[int], list[int]]] = []
    for label, attempt in evaluated:
        right: list[int] = []
        wrong: list[int] = []
        for path in attempt.episode_files:
            for one in attempt.scores(path):
                if one.reward is not None:
                    (right if one.reward >= RIGHT else wrong).append(one.tokens)
        if right or wrong:
            samples.append((label, right, wrong))
    if not samples:
        return Lengths()
    longest = max(length for _, *both in samples for lengths in both for length in lengths)
    width = max(1, math.ceil((longest + 1) / MOST_BINS))
    bins = longest // width + 1

    def count(lengths: list[int]) -> list[int]:
        counts = [0] * bins
        for length in lengths:
            counts[length // width] += 1
        return counts

    evaluations = [LengthCounts(label, count(right), count(wrong)) for label, right, wrong in samples]
    lowest = max(max(one.wrong) for one in evaluations)
    highest = max(max(one.right) for one in evaluations)
    return Lengths(
        centers=[place * width + (width - 1) / 2 for place in range(bins)],
        width=float(width),
        domain=(-1.05 * lowest, 1.05 * highest),
        evaluations=evaluations,
    )


def rates_of(evaluations: Sequence[Evaluation]) -> Rates:
    """Tasks by share of right samples: one bar for each possible share, or bins for many samples."""
    known = [one for one in evaluations if one.solved]
    if not known:
        return Rates()
    most = max(n for one in known for n, _ in one.solved.values())
    steps = min(most, RATE_BINS)
    rows = []
    for one in known:
        counts = [0] * (steps + 1)
        for n, c in one.solved.values():
            if n:
                counts[round(c / n * steps)] += 1
        rows.append(RateCounts(one.label, counts))
    return Rates([place / steps for place in range(steps + 1)], 1 / steps, rows)
