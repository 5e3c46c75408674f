"""Columns of the charts of training: metrics and timings, thinned for a screen."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from perilune.metrics.training import STEP_PARTS
from perilune.ui.attempt import Attempt, Columns
from perilune.ui.charts import CurveChart, select_charts

MAX_STEPS = 2000
EVALUATION_PREFIXES = ("eval/", "validation_")  # prefixes of columns that only evaluated steps have


@dataclass(frozen=True, slots=True)
class Training:
    """Metrics of one stage by step; `best` is the metric of the best checkpoint, "" without evaluations."""

    stage: str
    task: str
    description: str
    steps_total: int
    steps_kept: int
    charts: list[CurveChart]
    columns: Columns
    timings: Columns
    best: str = ""


def read_training(stage: str, task: str, description: str, attempt: Attempt) -> Training | None:
    """Return the curves of a stage, or None if it recorded no step."""
    metrics = attempt.metrics
    if not metrics.get("step"):
        return None
    timings = _add_throughput(attempt.timings)
    kept = thin_columns(metrics | _accumulate(metrics, timings), MAX_STEPS)
    return Training(
        stage=stage,
        task=task,
        description=description,
        steps_total=len(metrics["step"]),
        steps_kept=len(kept["step"]),
        charts=select_charts(task, metrics),
        columns=round_columns(kept),
        timings=round_columns(thin_columns(timings, MAX_STEPS)),
        best=_best_metric(attempt.spec.get("eval"), metrics),
    )


def _best_metric(settings: Any, metrics: Columns) -> str:
    """Return the metric by which a stage chooses its best checkpoint, as `EvaluationSettings.figure`."""
    keys = settings if isinstance(settings, Mapping) else {}
    others = keys.get("sets")
    sets = [f"{name}/pass@1" for name in ("heldout", *(others if isinstance(others, Mapping) else ()))]
    names = [f"eval/{name}" for name in (keys.get("best"), *sets, "data/loss")]
    return next((name for name in names if name in metrics), "")


def _accumulate(metrics: Columns, timings: Columns) -> Columns:
    """Return tokens and seconds of training up to each step, as further axes of the charts."""
    parts = [timings[part] for part in STEP_PARTS if part in timings]
    seconds = {
        step: math.fsum(part[row] or 0.0 for part in parts)
        for row, step in enumerate(timings.get("step", []))
    }
    totals = {
        "tokens": metrics.get("tokens", []),
        "seconds": [seconds.get(step, 0.0) for step in metrics["step"]],
    }
    return {
        f"reached/{name}": list(accumulate(value or 0.0 for value in values))
        for name, values in totals.items()
        if any(values)
    }


def sum_by_part(timings: Columns) -> dict[str, float] | None:
    """Return seconds by part, summed over the steps."""
    totals = {part: math.fsum(value or 0.0 for value in timings.get(part, [])) for part in STEP_PARTS}
    return totals if any(totals.values()) else None


def _add_throughput(timings: Columns) -> Columns:
    """Add tokens per second of the whole step, for stages that do not sample."""
    if any(timings.get("tokens_per_second", [])) or "tokens" not in timings:
        return timings
    rows = [dict(zip(timings, values, strict=True)) for values in zip(*timings.values(), strict=True)]
    return timings | {"tokens_per_second": [throughput(row) for row in rows]}


def throughput(timing: Mapping[str, Any]) -> float | None:
    """Return tokens per second of sampling, or of the whole step where nothing is sampled."""
    if sampled := timing.get("tokens_per_second"):
        return float(sampled)
    tokens, seconds = timing.get("tokens"), math.fsum(timing.get(part) or 0.0 for part in STEP_PARTS)
    return tokens / seconds if tokens and seconds else None


def even_places(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced indices below `count`, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / max(1, most - 1)) for index in range(most)]


def thin_columns(columns: Columns, most: int) -> Columns:
    """Return at most `most` rows: the first, the last, evenly spaced ones, and those with an evaluation.

    Evaluations take at most half of the rows.
    """
    rare = [values for name, values in columns.items() if name.startswith(EVALUATION_PREFIXES)]
    count = len(columns.get("step", []))
    evaluated = [row for row in range(count) if any(values[row] is not None for values in rare)]
    if len(evaluated) == count:
        evaluated = []
    kept = [evaluated[place] for place in even_places(len(evaluated), (most - 1) // 2)]
    places = sorted({*kept, *even_places(count, most - len(kept))})
    return {name: [values[place] for place in places] for name, values in columns.items()}


def round_columns(columns: Columns) -> Columns:
    """Return columns rounded to seven significant digits, to save bytes."""
    return {name: [_round_value(value) for value in values] for name, values in columns.items()}


def _round_value(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, float):
        return value if isinstance(value, int) else None
    return float(f"{value:.7g}") if math.isfinite(value) else None
