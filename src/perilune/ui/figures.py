"""Charts of tasks and answers: pass rates, lengths, objectives and calibrations.

A figure is the JSON input of `Charts.figure` in charts.js; `as` names the format of an axis.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from perilune.ui.attempt import Attempt
from perilune.ui.episodes import RIGHT_REWARD
from perilune.ui.evaluations import Evaluation

Figure = dict[str, Any]

MAX_BINS = 40
MAX_RATE_BINS = 20
MAX_TICKS = 12


def environment_charts(evaluations: Sequence[Evaluation]) -> list[Figure]:
    """Return pass@1 of each part of a mixture at each evaluation."""
    mixtures = [evaluation for evaluation in evaluations if evaluation.by_environment]
    series = []
    for index, name in enumerate(sorted({name for mixture in mixtures for name in mixture.by_environment})):
        bounds = [mixture.by_environment.get(name, (None, None, None)) for mixture in mixtures]
        y, low, high = zip(*bounds, strict=True)
        points = {"x": list(range(len(mixtures))), "y": y, "low": low, "high": high, "points": True}
        series.append({"name": name, "color": index % 6 + 1, **points})
    figure = {
        "kind": "lines",
        "key": "environments",
        "title": "pass@1 on held-out tasks by environment",
        "note": "The environments of the mixture, with 95% intervals from resampling tasks.",
        "height": 260,
        "x": {"categories": [mixture.label for mixture in mixtures]},
        "y": {"as": "share", "ticks": 5},
        "valueLabels": True,
        "showLegend": True,
        "series": series,
    }
    return [figure] if series else []


def difficulty_charts(evaluations: Sequence[Evaluation]) -> list[Figure]:
    """Return pass@1 over the difficulty of tasks, if an environment grades them."""
    graded = [evaluation for evaluation in evaluations if evaluation.by_difficulty]
    grades = sorted({row[0] for evaluation in graded for row in evaluation.by_difficulty})
    points = [
        {"x": [row[0] for row in evaluation.by_difficulty], "y": [row[2] for row in evaluation.by_difficulty]}
        for evaluation in graded
    ]
    ticks = {"ticks": grades} if len(grades) <= MAX_TICKS else {}
    return _evaluation_charts(
        graded,
        points,
        key="difficulty",
        title="pass@1 by difficulty",
        note="Difficulty as given by the environment. Each point is the mean over tasks of one difficulty.",
        x={"label": "difficulty", "name": "difficulty", "as": "number", **ticks},
    )


def pass_at_k_charts(evaluations: Sequence[Evaluation]) -> list[Figure]:
    """Return pass@k over k, if more than two k were measured."""
    ks = sorted({int(name[5:]) for item in evaluations for name in item.measures if name.startswith("pass@")})
    points = []
    for evaluation in evaluations:
        known = [k for k in ks if f"pass@{k}" in evaluation.measures]
        y, low, high = (
            zip(*(evaluation.measures[f"pass@{k}"] for k in known), strict=True) if known else ((), (), ())
        )
        points.append({"x": known, "y": y, "low": low, "high": high})
    return _evaluation_charts(
        evaluations if len(ks) > 2 else (),
        points,
        key="passk",
        title="pass@k for more samples",
        note="pass@k: the chance that at least one of k samples is right, by the unbiased estimator.",
        x={"label": "k", "name": "k =", "as": "integer", "ticks": ks},
    )


def _evaluation_charts(
    evaluations: Sequence[Evaluation], points: Sequence[Figure], **more: Any
) -> list[Figure]:
    series = [
        {"name": item.label, "color": color, "points": True, "hollow": item is not evaluations[-1], **given}
        for item, color, given in zip(evaluations, _colors(len(evaluations)), points, strict=False)
    ]
    look = {"kind": "lines", "height": 230, "y": {"as": "share"}, "quietLegend": True, "showLegend": True}
    return [{**look, **more, "series": series}] if series else []


def _colors(count: int) -> list[int]:
    """Return colors of evaluations: the last stands out, then the second to last."""
    return [7] * (count - 2) + [2, 1][-count:]


def pass_rate_charts(evaluations: Sequence[Evaluation]) -> list[Figure]:
    """Return tasks by share of right samples: one bar for each possible share, or bins for many samples."""
    known = [evaluation for evaluation in evaluations if evaluation.solved]
    if not known:
        return []
    steps = min(MAX_RATE_BINS, max(n for evaluation in known for n, _ in evaluation.solved.values()))
    centers = [index / steps for index in range(steps + 1)]
    series = []
    for evaluation, color in zip(known, _colors(len(known)), strict=True):
        counts = [0] * (steps + 1)
        for n, right in evaluation.solved.values():
            if n:
                counts[round(right / n * steps)] += 1
        series.append({"name": evaluation.label, "values": counts, "color": color})
    axis = {"label": "share of samples that are right", "name": "solved in", "as": "rate", "ticks": centers}
    return [
        {
            "kind": "bars",
            "key": "rates",
            "title": "Histogram of pass rates",
            "note": "Each task's share of right samples. Tasks near 0% or 100% mostly give dead groups: "
            "equal rewards give no gradient.",
            "height": 230,
            "mode": "grouped",
            "x": {**axis, "centers": centers, "width": 1 / steps},
            "y": {"as": "integer"},
            "series": series,
        }
    ]


def objective_chart(label: str, samples: int, curve: Sequence[Sequence[float]]) -> Figure:
    """Return the weight w(p) that an estimator gives to a task with pass rate p; `curve` has (p, w)."""
    p, w = zip(*curve, strict=True)
    return {
        "kind": "lines",
        "key": "objective",
        "title": f"Implicit objective of {label}",
        "note": "The weight w(p) of a task with pass rate p in the expected gradient, w(p)·∇p, for groups of "
        f"{samples} and rewards of 0 or 1. A flat line optimizes pass@1 itself. Compare it with the "
        "histogram of pass rates.",
        "height": 230,
        "x": {"label": "pass rate p of a task", "name": "p =", "as": "percent"},
        "y": {"as": "short", "log": True},
        "showLegend": True,
        "series": [{"name": "w(p)", "x": p, "y": w, "color": 4}],
    }


def length_charts(evaluated: Sequence[tuple[str, Attempt]]) -> list[Figure]:
    """Return histograms of the lengths of right and wrong answers of each (label, attempt), on one scale."""
    samples: list[tuple[str, list[int], list[int]]] = []
    for label, attempt in evaluated:
        right: list[int] = []
        wrong: list[int] = []
        for path in attempt.episode_files:
            for score in attempt.scores(path):
                if score.reward is not None:
                    (right if score.reward >= RIGHT_REWARD else wrong).append(score.tokens)
        if right or wrong:
            samples.append((label, right, wrong))
    longest = max((length for _, *both in samples for lengths in both for length in lengths), default=0)
    width = max(1, math.ceil((longest + 1) / MAX_BINS))
    bins = longest // width + 1

    def count(lengths: list[int]) -> list[int]:
        counts = [0] * bins
        for length in lengths:
            counts[length // width] += 1
        return counts

    counted = [(label, count(right), count(wrong)) for label, right, wrong in samples]
    starts = [index * width for index in range(bins)]
    x = {
        "label": "tokens",
        "as": "integer",
        "centers": [start + (width - 1) / 2 for start in starts],
        "width": width,
        "names": [f"{start:,}{f' to {start + width - 1:,}' if width > 1 else ''} tokens" for start in starts],
    }
    highest = max((max(right) for _, right, _ in counted), default=0)
    lowest = max((max(wrong) for _, _, wrong in counted), default=0)
    y = {"as": "integer", "domain": (-1.05 * lowest, 1.05 * highest)}
    look = {"kind": "bars", "key": "lengths", "mode": "mirrored", "height": 200, "x": x, "y": y}
    return [
        {
            **look,
            "title": label,
            "series": [
                {"name": "right", "values": right, "color": 1},
                {"name": "wrong", "values": wrong, "color": 2},
            ],
        }
        for label, right, wrong in counted
    ]


def calibration_charts(stage: str, found: Mapping[str, Any]) -> list[Figure]:
    """Return estimated and Monte Carlo values; `found` is the summary of a calibrate stage."""
    prefixes, reliability = found["by_place"], found["reliability"]
    is_share = all(row["value"] >= 0 for row in prefixes)
    y = {"as": "share"} if is_share else {"as": "short", "zero": False}
    sides = (("estimated value", "value", 1), ("Monte Carlo value", "played", 2))

    def chart(rows: Sequence[Figure], at: Sequence[int], x: Figure, **more: str) -> Figure:
        series = [
            {"name": name, "x": at, "y": [float(row[field]) for row in rows], "color": color, "points": True}
            for name, field, color in sides
        ]
        look = {"kind": "lines", "height": 230, "y": y, "showLegend": True, "series": series}
        return {**look, **more, "x": {"as": "integer", **x}}

    return [
        chart(
            prefixes,
            [int(row["place"]) for row in prefixes],
            {"label": "segments written", "name": "after"},
            key=f"{stage}-places",
            title="Value of the prefixes of answers",
            note="Mean over answers with that many segments. If the estimate falls and the Monte Carlo value "
            "does not, the estimate may have been requested at a prefix where the policy never answers.",
        ),
        chart(
            reliability,
            list(range(1, len(reliability) + 1)),
            {"label": "decile of the estimate", "name": "decile"},
            key=f"{stage}-reliability",
            title="Estimated and Monte Carlo values, by decile of the estimate",
            note="Where the lines agree, the estimate is a calibrated probability of being right.",
        ),
    ]
