"""Charts of the changes between evaluations."""

import math
from collections.abc import Mapping, Sequence

from perilune.ui.evaluations import Comparison, Evaluation
from perilune.ui.figures import Figure
from perilune.ui.headline import format_percent, format_points

GREEDY = "greedy"


def select_measures(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the measures to show of all evaluations: pass@k of the lowest and the highest k, and greedy."""
    names = {name for evaluation in evaluations for name in evaluation.measures}
    passes = sorted(names - {GREEDY}, key=lambda name: int(name.removeprefix("pass@")))
    return [name for name in dict.fromkeys([*passes[:1], *passes[-1:], GREEDY]) if name in names]


def climb_chart(evaluations: Sequence[Evaluation], comparisons: Sequence[Comparison]) -> Figure | None:
    """Return the chart of all evaluations, each joined to the evaluation that it is compared with."""
    if not evaluations:
        return None
    positions = {evaluation.stage: index for index, evaluation in enumerate(evaluations)}
    series = []
    for name in select_measures(evaluations):
        bounds = [evaluation.measures.get(name, (None, None, None)) for evaluation in evaluations]
        y, low, high = zip(*bounds, strict=True)
        other = name != "pass@1"
        look = {"color": _color(name), "points": True, "hollow": other, "dash": other}
        if not other and len(y) > 1:
            look["best"] = max(range(len(y)), key=lambda place: y[place] or 0.0)
        series.append({"name": name, "x": list(positions.values()), "y": y, "low": low, "high": high, **look})
    return {
        "kind": "lines",
        "key": "climb",
        "title": "Held-out accuracy at each evaluation",
        "note": "Lines join each evaluation to that of the checkpoint before. A ring marks the best pass@1. "
        "Bars are 95% intervals from resampling tasks.",
        "height": 240,
        "edges": [(positions[comparison.before], positions[comparison.after]) for comparison in comparisons],
        "x": {"categories": [evaluation.label for evaluation in evaluations]},
        "y": {"as": "share", "ticks": 5},
        "series": series,
        "valueLabels": True,
        "quietLegend": True,
    }


def difference_charts(comparisons: Sequence[Comparison], measures: Sequence[str]) -> list[Figure]:
    """Return one chart of paired differences for each pair of evaluations, all on one scale."""
    paired = [comparison for comparison in comparisons if comparison.differences]
    bounds = [end for pair in paired for span in pair.differences.values() for end in (span.low, span.high)]
    lowest, highest = min(bounds, default=0.0), max(bounds, default=0.0)
    pad = 0.06 * max(0.05, highest, -lowest)
    domain = (min(0.0, lowest - pad * (lowest < 0)), max(0.0, highest + pad * (highest > 0)))

    def row(name: str, mean: float, low: float, high: float) -> Figure:
        ends = f"{format_points(low)} to {format_points(high)}"
        return {
            "label": name,
            "value": f"{format_points(mean)}  [{format_points(low)}, {format_points(high)}]",
            "marks": [{"whisker": (low, high), "color": _color(name)}, {"dot": mean, "color": _color(name)}],
            "details": [{"name": "95% interval", "value": f"{format_points(mean)} points, {ends}"}],
        }

    return [
        {
            "kind": "rows",
            "key": "differences",
            "title": f"{pair.after_label} minus {pair.before_label}",
            "note": f"{pair.tasks} shared tasks, paired.",
            "x": {"as": "points", "domain": domain, "label": "points", "zero": True},
            "rows": [row(name, *pair.differences[name]) for name in measures if name in pair.differences],
        }
        for pair in paired
    ]


def contribution_charts(comparison: Comparison | None) -> list[Figure]:
    """Return the change of pass@1 by strategy, and each strategy's share and accuracy before and after."""
    if comparison is None or not comparison.contributions:
        return []
    shares = [contribution.share for contribution in comparison.contributions]
    accuracies = [contribution.accuracy for contribution in comparison.contributions]
    return [
        _waterfall(comparison),
        _dumbbell(comparison, shares, "share", "How often each strategy is chosen"),
        _dumbbell(comparison, accuracies, "accuracy", "How often each strategy is right"),
    ]


def _waterfall(comparison: Comparison) -> Figure:
    before, after = comparison.accuracy
    shares = {part.strategy: part.from_share for part in comparison.contributions}
    accuracies = {part.strategy: part.from_accuracy for part in comparison.contributions}
    middle = before + math.fsum(shares.values())

    def end(label: str, value: float, color: int) -> Figure:
        text = format_percent(value)
        details = [{"name": "pass@1", "value": text}]
        marks = [{"bar": (0, value), "color": color}]
        return {"label": label, "value": text, "strong": True, "marks": marks, "details": details}

    def effect(label: str, parts: Mapping[str, float], start: float, color: int) -> Figure:
        value = math.fsum(parts.values())
        return {
            "label": label,
            "value": f"{format_points(value)} points",
            "marks": [{"bar": (start, start + value), "color": 2 if value < 0 else color}],
            "details": [
                {"name": name, "value": f"{format_points(part)} points"} for name, part in parts.items()
            ],
        }

    return {
        "kind": "rows",
        "key": "waterfall",
        "title": "Change of pass@1 by strategy",
        "note": "Share effect: change in a strategy's share times its mean accuracy. Accuracy effect: change "
        "in its accuracy times its mean share. Their sum is the whole difference.",
        "rowHeight": 46,
        "x": {
            "as": "percent",
            "domain": (min(0.0, before, middle, after), max(before, middle, after) * 1.04),
            "zero": True,
        },
        "rows": [
            end(comparison.before_label, before, 7),
            effect("choice of strategy", shares, before, 5),
            effect("accuracy within", accuracies, middle, 3),
            end(comparison.after_label, after, 1),
        ],
    }


def _dumbbell(
    comparison: Comparison, pairs: Sequence[tuple[float | None, float | None]], key: str, title: str
) -> Figure:
    legend = [
        {"name": comparison.before_label, "color": 7, "hollow": True},
        {"name": comparison.after_label, "color": 1},
    ]

    def row(name: str, sides: tuple[float | None, float | None]) -> Figure:
        texts = ["–" if value is None else format_percent(value) for value in sides]
        bar = [{"bar": sides, "color": 1, "thin": True}] if None not in sides else []
        dots = [{"dot": value, **look} for value, look in zip(sides, legend, strict=True)]
        details = [{"name": look["name"], "value": text} for look, text in zip(legend, texts, strict=True)]
        return {"label": name, "value": " → ".join(texts), "marks": [*bar, *dots], "details": details}

    rows = [row(part.strategy, sides) for part, sides in zip(comparison.contributions, pairs, strict=True)]
    return {"kind": "rows", "key": key, "title": title, "legend": legend, "x": {"as": "share"}, "rows": rows}


def _color(measure: str) -> int:
    return {"pass@1": 1, GREEDY: 3}.get(measure, 2)
