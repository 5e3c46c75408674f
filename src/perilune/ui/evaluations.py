"""Compares two evaluations, and splits the difference by strategy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perilune.metrics.bootstrap import Interval
from perilune.metrics.proportion import pass_at_k_change

UNRECOGNIZED = "unrecognized"
UNTRAINED = "untrained"  # label of a model with random weights
MIN_SHARED_TASK_SHARE = 0.9  # share of the larger evaluation's tasks that a paired difference needs
RARE_STRATEGY_SHARE = 0.01  # strategies with a smaller share of the answers are shown together
ROUNDING_SHARE = 1e-6  # a share below this is rounding

Bounds = tuple[float, float | None, float | None]  # mean, low, high of a 95% interval


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation: `measures` are "pass@1", "pass@8", ..., "greedy", in the order the report shows them.

    Attributes:
        label: the judged checkpoint as a label ("untrained", "after sft").
        by_difficulty: (difficulty, number of tasks, pass@1).
        by_environment: pass@1 of each part of a mixture, by its name.
        strategies: (share of answers, accuracy or None if never chosen) by name.
        solved: (samples, right samples) by task id.
        greedy: whether the greedy answer was right, by task id.
    """

    stage: str
    label: str
    environment: str
    tasks: int
    samples: int
    measures: Mapping[str, Bounds]
    mean_length: float | None
    truncated: float | None
    failures: int | None
    tokens_per_second: float | None
    seconds: float | None
    by_difficulty: Sequence[tuple[float, int, float]] = ()
    by_environment: Mapping[str, Bounds] = field(default_factory=dict)
    strategies: Mapping[str, tuple[float, float | None]] = field(default_factory=dict)
    solved: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    greedy: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Contribution:
    """The contribution of one strategy to a difference in pass@1; pairs are (before, after)."""

    strategy: str
    share: tuple[float, float]
    accuracy: tuple[float | None, float | None]
    from_share: float
    from_accuracy: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The later minus the earlier evaluation. `differences` are paired over the common tasks."""

    before: str
    after: str
    before_label: str
    after_label: str
    tasks: int
    accuracy: tuple[float, float]
    differences: Mapping[str, Interval]
    contributions: Sequence[Contribution]


def read_evaluation(
    stage: str, label: str, summary: Mapping[str, Any], greedy: Mapping[str, bool]
) -> Evaluation | None:
    """Return the evaluation in a summary.json, or None for another summary. Missing values are None."""
    if not isinstance(summary.get("pass@1"), Mapping):
        return None
    names = sorted((key for key in summary if key.startswith("pass@")), key=lambda key: int(key[5:]))
    length = summary.get("length")
    return Evaluation(
        stage=stage,
        label=label,
        environment=str(summary.get("environment", "")),
        tasks=int(summary.get("tasks", 0)),
        samples=int(summary.get("samples", 0)),
        measures={key: _read_bounds(summary[key]) for key in [*names, "greedy"] if summary.get(key)},
        mean_length=_number(length.get("mean") if isinstance(length, Mapping) else length),
        truncated=_number(summary.get("truncated")),
        failures=None if (failures := summary.get("failures")) is None else int(failures),
        tokens_per_second=_number(summary.get("tokens_per_second")),
        seconds=_number(summary.get("seconds")),
        by_difficulty=tuple(
            (float(row["difficulty"]), int(row["tasks"]), _read_bounds(row["pass@1"])[0])
            for row in summary.get("by_difficulty") or ()
            if row.get("difficulty") is not None
        ),
        by_environment={
            str(part): _read_bounds(measures["pass@1"])
            for part, measures in (summary.get("by_environment") or {}).items()
            if measures.get("pass@1")
        },
        strategies={
            str(name): (float(row["share"]), _number(row.get("accuracy")))
            for name, row in (summary.get("strategies") or {}).items()
        },
        solved={str(task): (int(n), int(c)) for task, n, c in summary.get("correct_per_task") or ()},
        greedy=greedy,
    )


def _read_bounds(value: Any) -> Bounds:
    if isinstance(value, Mapping):
        return (float(value["mean"]), _number(value.get("low")), _number(value.get("high")))
    return (float(value), None, None)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def compare_evaluations(before: Evaluation, after: Evaluation) -> Comparison:
    """Return the later evaluation minus the earlier, paired by task."""
    return Comparison(
        before=before.stage,
        after=after.stage,
        before_label=before.label,
        after_label=after.label,
        tasks=len(before.solved.keys() & after.solved.keys()),
        accuracy=(before.measures["pass@1"][0], after.measures["pass@1"][0]),
        differences=_paired_differences(before, after),
        contributions=split_by_strategy(before, after),
    )


def _paired_differences(before: Evaluation, after: Evaluation) -> dict[str, Interval]:
    """Return the differences of the measures of both evaluations, if most of their tasks are common."""
    differences = {}
    for name in [name for name in after.measures if name in before.measures]:
        k = 1 if name == "greedy" else int(name.removeprefix("pass@"))
        earlier, later = _count_right(before, name), _count_right(after, name)
        paired = pass_at_k_change(earlier, later, k)
        if paired and paired[1] > MIN_SHARED_TASK_SHARE * max(len(earlier), len(later)):
            differences[name] = paired[0]
    return differences


def _count_right(evaluation: Evaluation, measure: str) -> list[tuple[str, int, int]]:
    """Return each task with its scored and its right answers."""
    if measure == "greedy":
        return [(task, 1, int(right)) for task, right in evaluation.greedy.items()]
    return [(task, *counts) for task, counts in evaluation.solved.items()]


def split_by_strategy(before: Evaluation, after: Evaluation) -> tuple[Contribution, ...]:
    """Split the difference in pass@1 into choice of strategy and accuracy within strategies.

    pass@1 = sum over strategies s of share_s * accuracy_s, so the difference is exactly

        sum of (share change) * (mean accuracy)  +  sum of (accuracy change) * (mean share),

    where means are over before and after, so the split is symmetric. A strategy that one side never chose has
    no accuracy there; it gets the accuracy of the other side, so its whole contribution is choice.
    """
    sides = [_with_unrecognized(evaluation) for evaluation in (before, after)]
    if not any(sides):
        return ()
    contributions = []
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        (share0, known0), (share1, known1) = (side.get(name, (0.0, None)) for side in sides)
        accuracy0 = known0 if known0 is not None else known1 or 0.0
        accuracy1 = known1 if known1 is not None else accuracy0
        contributions.append(
            Contribution(
                strategy=name,
                share=(share0, share1),
                accuracy=(known0, known1),
                from_share=(share1 - share0) * (accuracy0 + accuracy1) / 2,
                from_accuracy=(accuracy1 - accuracy0) * (share0 + share1) / 2,
            )
        )
    return _merge_rare(contributions)


def _merge_rare(contributions: Sequence[Contribution]) -> tuple[Contribution, ...]:
    """Merge the strategies that are rare on both sides into one; sums stay the same."""
    rare = [contribution for contribution in contributions if max(contribution.share) < RARE_STRATEGY_SHARE]
    if not rare:
        return tuple(contributions)
    shares, right = [0.0, 0.0], [0.0, 0.0]
    for contribution in rare:
        for side in (0, 1):
            shares[side] += contribution.share[side]
            right[side] += contribution.share[side] * (contribution.accuracy[side] or 0.0)
    accuracy = [part / share if share else None for part, share in zip(right, shares, strict=True)]
    together = Contribution(
        strategy=f"{len(rare)} strateg{'ies' if len(rare) > 1 else 'y'} under {RARE_STRATEGY_SHARE:.0%}",
        share=(shares[0], shares[1]),
        accuracy=(accuracy[0], accuracy[1]),
        from_share=math.fsum(contribution.from_share for contribution in rare),
        from_accuracy=math.fsum(contribution.from_accuracy for contribution in rare),
    )
    return (*(contribution for contribution in contributions if contribution not in rare), together)


def _with_unrecognized(evaluation: Evaluation) -> dict[str, tuple[float, float | None]]:
    """Return the strategies and an unrecognized rest: shares then sum to 1, and contributions to pass@1."""
    if not evaluation.strategies:
        return {}
    parts = dict(evaluation.strategies)
    share = 1.0 - sum(part for part, _ in parts.values())
    if share > ROUNDING_SHARE:
        rest = evaluation.measures["pass@1"][0] - sum(part * (right or 0.0) for part, right in parts.values())
        parts[UNRECOGNIZED] = (share, min(1.0, max(0.0, rest / share)))
    return parts
