"""Decomposes the change of the answer length into behaviour of the policy and composition of the tasks.

The mean length is sum_b w_b L_b over bins b of task difficulty. Between two steps

    change = sum_b w_b dL_b  (behaviour)  +  sum_b dw_b L_b  (composition),

which is exact if w and L are the averages of both steps. Without the decomposition, a curriculum or dynamic
sampling could look like a policy that writes more.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perilune.data.episode import Episode

CORRECT_REWARD = 1.0
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Bin:
    """Answers to tasks of one difficulty: their number, and mean length in tokens."""

    count: int
    length: float


@dataclass(frozen=True, slots=True)
class Decomposition:
    """Mean lengths before and after, and the two parts of the difference, in tokens."""

    before: float
    after: float
    behaviour: float
    composition: float


def decompose_length(before: Mapping[str, Bin], after: Mapping[str, Bin]) -> Decomposition:
    """Split the change of the mean length into behaviour and composition.

    A bin that only one side has contributes to the composition alone.
    """
    totals = [sum(item.count for item in side.values()) for side in (before, after)]
    behaviour, composition = [], []
    for name in sorted(before.keys() | after.keys()):
        shares = [
            side[name].count / total if name in side else 0.0
            for side, total in zip((before, after), totals, strict=True)
        ]
        lengths = [side[name].length for side in (before, after) if name in side]
        behaviour.append((shares[0] + shares[1]) / 2 * (lengths[-1] - lengths[0]))
        composition.append((shares[1] - shares[0]) * (lengths[0] + lengths[-1]) / 2)
    return Decomposition(
        _mean_length(before), _mean_length(after), math.fsum(behaviour), math.fsum(composition)
    )


def length_bins(episodes: Sequence[Episode]) -> dict[str, Bin]:
    """Return the bins by difficulty ("unknown" if the environment does not state it)."""
    lengths: dict[str, list[int]] = defaultdict(list)
    for episode in episodes:
        lengths[_difficulty(episode)].append(episode.sampled)
    return {name: Bin(len(values), sum(values) / len(values)) for name, values in lengths.items()}


def length_dynamics(before: Sequence[Episode], after: Sequence[Episode]) -> dict[str, Any]:
    """Compare the lengths at two steps, for the report.

    Returns:
        before, after, behaviour, composition (tokens); `table`: rows of difficulty, correct, and
        before / after: {count, length, truncated} or None without such answers.
    """
    split = decompose_length(length_bins(before), length_bins(after))
    cells = [_summarize_answers(before), _summarize_answers(after)]
    keys = sorted(cells[0].keys() | cells[1].keys(), key=lambda key: (_sort_key(key[0]), key[1]))
    return {
        "before": split.before,
        "after": split.after,
        "behaviour": split.behaviour,
        "composition": split.composition,
        "table": [
            {"difficulty": difficulty, "correct": correct}
            | {
                name: side.get((difficulty, correct))
                for name, side in zip(("before", "after"), cells, strict=True)
            }
            for difficulty, correct in keys
        ],
    }


def _mean_length(bins: Mapping[str, Bin]) -> float:
    total = sum(item.count for item in bins.values())
    return math.fsum(item.count * item.length for item in bins.values()) / total if total else 0.0


def _summarize_answers(episodes: Sequence[Episode]) -> dict[tuple[str, bool], dict[str, float]]:
    groups: dict[tuple[str, bool], list[Episode]] = defaultdict(list)
    for episode in episodes:
        if episode.reward is not None:
            correct = episode.metrics.get("gold", episode.reward) >= CORRECT_REWARD
            groups[_difficulty(episode), correct].append(episode)
    return {
        key: {
            "count": len(group),
            "length": sum(episode.sampled for episode in group) / len(group),
            "truncated": sum(episode.truncated for episode in group) / len(group),
        }
        for key, group in groups.items()
    }


def _difficulty(episode: Episode) -> str:
    value = episode.metrics.get("difficulty")
    return UNKNOWN if value is None else f"{value:g}"


def _sort_key(difficulty: str) -> float:
    return math.inf if difficulty == UNKNOWN else float(difficulty)
