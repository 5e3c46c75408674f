"""What a calibration says: do cheap values of prefixes put them in the order that play does?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perilune.metrics.rank_correlation import Figures, ceiling, spearman, spearman_over_problems

BINS = 10  # of the reliability curve
MOST_PLACES = 12  # by which values are told apart


@dataclass(frozen=True, slots=True, eq=False)
class Calibrated:
    """One answer's prefixes.

    Attributes:
        task_id: whose.
        values: float64[prefixes], the cheap ones.
        verdicts: float64[prefixes, continuations], of play, without NaN.
    """

    task_id: str
    values: NDArray[np.float64]
    verdicts: NDArray[np.float64]

    @property
    def played(self) -> Figures:
        """Mean verdict of each prefix."""
        return np.asarray(self.verdicts.mean(axis=1))


def calibration_summary(answers: Sequence[Calibrated], seed: int) -> dict[str, Any]:
    """The figures of a calibration; intervals are over tasks.

    Returns:
        values: of all prefixes. differences: of what each segment before the last earned, which is what is
        learned from. Each with `count`, `spearman` (an interval, or null), and `ceiling`, what a perfect
        value would reach beside so few continuations. by_place: the same for each prefix by its place.
        reliability: mean value and mean of play in tenths of the values. standard_error: mean of play's.
    """
    return {
        "values": _agreement(answers, seed, differences=False),
        "differences": _agreement(answers, seed, differences=True),
        "by_place": _by_place(answers),
        "reliability": _reliability(answers),
        "standard_error": _standard_error(answers),
    }


def flat(summary: Mapping[str, Any]) -> dict[str, float]:
    """The figures that go into metrics.jsonl, where there are any."""
    found = {}
    for name in ("values", "differences"):
        interval = summary[name]["spearman"]
        if interval is not None:
            found[f"spearman_{name}"] = interval["mean"]
    return found


def told(summary: Mapping[str, Any]) -> list[str]:
    """What there is to say, in sentences."""
    names = {"values": "values of prefixes", "differences": "what segments earn"}
    said = []
    for name, what in names.items():
        interval, best = summary[name]["spearman"], summary[name]["ceiling"]
        if interval is None:
            said.append(f"{what}: nothing to correlate in {summary[name]['count']}")
            continue
        most = "" if best is None else f"; a perfect value would reach {best:.2f}"
        said.append(
            f"{what} and play: Spearman {interval['mean']:.2f} ({interval['low']:.2f} to"
            f" {interval['high']:.2f}) over {summary[name]['count']}{most}"
        )
    interval = summary["differences"]["spearman"]
    if interval is None or interval["low"] <= 0:
        said.append("do not trust these process rewards: they do not pay for what leads to right answers")
    return said


def _agreement(answers: Sequence[Calibrated], seed: int, *, differences: bool) -> dict[str, Any]:
    def of(figures: Figures) -> Figures:
        return np.diff(figures) if differences else figures

    by_task: dict[str, list[tuple[Figures, Figures]]] = defaultdict(list)
    for one in answers:
        by_task[one.task_id].append((of(one.values), of(one.played)))
    pairs = [
        (np.concatenate([a for a, _ in some]), np.concatenate([b for _, b in some]))
        for some in by_task.values()
    ]
    found = spearman_over_problems(pairs, seed=seed)
    halves = [
        np.concatenate([np.zeros(0), *(of(one.verdicts[:, side::2].mean(axis=1)) for one in answers)])
        for side in (0, 1)
    ]
    return {
        "count": sum(len(a) for a, _ in pairs),
        "spearman": None if found is None else found._asdict(),
        "ceiling": ceiling(*halves) if len(halves[0]) > 1 else None,
    }


def _by_place(answers: Sequence[Calibrated]) -> list[dict[str, Any]]:
    found = []
    for place in range(min(MOST_PLACES, max((len(one.values) for one in answers), default=0))):
        there = [one for one in answers if len(one.values) > place]
        values = np.array([one.values[place] for one in there])
        played = np.array([one.played[place] for one in there])
        found.append(
            {
                "place": place,
                "count": len(there),
                "value": float(values.mean()),
                "played": float(played.mean()),
                "spearman": spearman(values, played) if len(there) > 1 else None,
            }
        )
    return found


def _reliability(answers: Sequence[Calibrated]) -> list[dict[str, float]]:
    if not answers:
        return []
    values = np.concatenate([one.values for one in answers])
    played = np.concatenate([one.played for one in answers])
    order = np.argsort(values, kind="stable")
    return [
        {"count": len(part), "value": float(values[part].mean()), "played": float(played[part].mean())}
        for part in np.array_split(order, BINS)
        if len(part)
    ]


def _standard_error(answers: Sequence[Calibrated]) -> float | None:
    errors = [one.verdicts.std(axis=1) / math.sqrt(one.verdicts.shape[1]) for one in answers]
    return float(np.concatenate(errors).mean()) if errors else None
