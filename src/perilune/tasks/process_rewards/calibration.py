"""Statistics of a calibration: whether cheap values rank prefixes as Monte Carlo values do."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perilune.metrics.rank_correlation import Figures, correlation_ceiling, spearman, spearman_over_problems

BINS = 10  # bins of the reliability curve
MOST_PLACES = 12  # prefixes of an answer for which `by_place` has an entry


@dataclass(frozen=True, slots=True, eq=False)
class CalibratedAnswer:
    """The prefixes of one answer.

    Attributes:
        values: float64[prefixes], cheap values.
        rewards: float64[prefixes, continuations], rewards of continuations, without NaN.
    """

    task_id: str
    values: NDArray[np.float64]
    rewards: NDArray[np.float64]

    @property
    def played(self) -> Figures:
        """The Monte Carlo value of each prefix."""
        return np.asarray(self.rewards.mean(axis=1))


def calibration_summary(answers: Sequence[CalibratedAnswer], seed: int) -> dict[str, Any]:
    """Return the statistics of a calibration; intervals are over tasks.

    Returns:
        `values`: agreement of the values of all prefixes. `differences`: agreement of the process rewards of
        all segments but the last. Each has `count`, `spearman` (an interval, or null), and `ceiling`, the
        correlation of a perfect value with so few continuations. `by_place`: the same by index of the prefix.
        `reliability`: mean cheap and Monte Carlo value in tenths of the cheap values. `standard_error`: mean
        standard error of the Monte Carlo values.
    """
    return {
        "values": _agreement(answers, seed, differences=False),
        "differences": _agreement(answers, seed, differences=True),
        "by_place": _by_place(answers),
        "reliability": _reliability(answers),
        "standard_error": _standard_error(answers),
    }


def calibration_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics for metrics.jsonl: the correlations that could be computed."""
    intervals = {name: summary[name]["spearman"] for name in ("values", "differences")}
    return {f"spearman_{name}": value["mean"] for name, value in intervals.items() if value is not None}


def describe_calibration(summary: Mapping[str, Any]) -> list[str]:
    names = {"values": "values of prefixes", "differences": "process rewards of segments"}
    sentences = []
    for name, label in names.items():
        interval, best = summary[name]["spearman"], summary[name]["ceiling"]
        if interval is None:
            sentences.append(f"{label}: {summary[name]['count']} of them give no correlation")
            continue
        note = "" if best is None else f"; a perfect value would reach {best:.2f}"
        sentences.append(
            f"{label} against Monte Carlo: Spearman {interval['mean']:.2f} ({interval['low']:.2f} to"
            f" {interval['high']:.2f}) over {summary[name]['count']}{note}"
        )
    interval = summary["differences"]["spearman"]
    if interval is None or interval["low"] <= 0:
        sentences.append("do not train on these process rewards: they do not predict right answers")
    return sentences


def _agreement(answers: Sequence[CalibratedAnswer], seed: int, *, differences: bool) -> dict[str, Any]:
    def of(figures: Figures) -> Figures:
        return np.diff(figures) if differences else figures

    by_task: dict[str, list[tuple[Figures, Figures]]] = defaultdict(list)
    for answer in answers:
        by_task[answer.task_id].append((of(answer.values), of(answer.played)))
    pairs = [
        (np.concatenate([a for a, _ in parts]), np.concatenate([b for _, b in parts]))
        for parts in by_task.values()
    ]
    correlation = spearman_over_problems(pairs, seed=seed)
    halves = [
        np.concatenate([np.zeros(0), *(of(answer.rewards[:, side::2].mean(axis=1)) for answer in answers)])
        for side in (0, 1)
    ]
    return {
        "count": sum(len(a) for a, _ in pairs),
        "spearman": None if correlation is None else correlation._asdict(),
        "ceiling": correlation_ceiling(*halves) if len(halves[0]) > 1 else None,
    }


def _by_place(answers: Sequence[CalibratedAnswer]) -> list[dict[str, Any]]:
    rows = []
    for index in range(min(MOST_PLACES, max((len(answer.values) for answer in answers), default=0))):
        longer = [answer for answer in answers if len(answer.values) > index]
        values = np.array([answer.values[index] for answer in longer])
        played = np.array([answer.played[index] for answer in longer])
        rows.append(
            {
                "place": index,
                "count": len(longer),
                "value": float(values.mean()),
                "played": float(played.mean()),
                "spearman": spearman(values, played) if len(longer) > 1 else None,
            }
        )
    return rows


def _reliability(answers: Sequence[CalibratedAnswer]) -> list[dict[str, float]]:
    if not answers:
        return []
    values = np.concatenate([answer.values for answer in answers])
    played = np.concatenate([answer.played for answer in answers])
    order = np.argsort(values, kind="stable")
    return [
        {"count": len(part), "value": float(values[part].mean()), "played": float(played[part].mean())}
        for part in np.array_split(order, BINS)
        if len(part)
    ]


def _standard_error(answers: Sequence[CalibratedAnswer]) -> float | None:
    errors = [answer.rewards.std(axis=1) / math.sqrt(answer.rewards.shape[1]) for answer in answers]
    return float(np.concatenate(errors).mean()) if errors else None
