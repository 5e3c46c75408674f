"""Columns of the charts: metrics, timings and hardware, thinned to what a screen can show."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from perilune.ui.attempt import Attempt, Columns
from perilune.ui.charts import CurveChart, charts_of

MOST_STEPS = 2000
HARDWARE_POINTS = 600
PARTS = ("sampling", "scoring", "learning", "other")


@dataclass(frozen=True, slots=True)
class Training:
    """Metrics of one stage by step; `totals` are seconds by part over all steps."""

    stage: str
    task: str
    description: str
    steps_total: int
    steps_kept: int
    charts: list[CurveChart]
    columns: Columns
    timings: Columns
    totals: Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class Band:
    """The interval of one stage on the time axis, in seconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Hardware:
    """Load of the machine in percent and bytes, on a time axis with the stages one after another."""

    columns: Columns
    bands: list[Band]
    note: str


def training_of(stage: str, task: str, description: str, attempt: Attempt) -> Training | None:
    """The curves of a stage, or None if it recorded no step."""
    metrics = attempt.metrics
    if not metrics.get("step"):
        return None
    timings = _with_throughput(attempt.timings)
    kept = thin(metrics | _reached(metrics, timings), MOST_STEPS)
    return Training(
        stage=stage,
        task=task,
        description=description,
        steps_total=len(metrics["step"]),
        steps_kept=len(kept["step"]),
        charts=charts_of(task, metrics),
        columns=_rounded(kept),
        timings=_rounded(thin(timings, MOST_STEPS)),
        totals=totals_of(timings),
    )


def _reached(metrics: Columns, timings: Columns) -> Columns:
    """Tokens and seconds of training up to each step, as further axes of the charts."""
    parts = [timings[part] for part in PARTS if part in timings]
    seconds = {
        step: math.fsum(part[row] or 0.0 for part in parts)
        for row, step in enumerate(timings.get("step", []))
    }
    spent = {
        "tokens": metrics.get("tokens", []),
        "seconds": [seconds.get(step, 0.0) for step in metrics["step"]],
    }
    return {
        f"reached/{name}": list(accumulate(value or 0.0 for value in values))
        for name, values in spent.items()
        if any(values)
    }


def totals_of(timings: Columns) -> dict[str, float] | None:
    """Seconds by part, summed over the steps."""
    totals = {part: math.fsum(value or 0.0 for value in timings.get(part, [])) for part in PARTS}
    return totals if any(totals.values()) else None


def _with_throughput(timings: Columns) -> Columns:
    """Timings with tokens per second of the whole step, for stages that do not sample."""
    if any(timings.get("tokens_per_second", [])) or "tokens" not in timings:
        return timings
    rows = [dict(zip(timings, values, strict=True)) for values in zip(*timings.values(), strict=True)]
    return timings | {"tokens_per_second": [throughput(row) for row in rows]}


def throughput(timing: Mapping[str, Any]) -> float | None:
    """Tokens per second of sampling, or of the whole step where nothing is sampled."""
    if sampled := timing.get("tokens_per_second"):
        return float(sampled)
    tokens, seconds = timing.get("tokens"), math.fsum(timing.get(part) or 0.0 for part in PARTS)
    return tokens / seconds if tokens and seconds else None


def thin(columns: Columns, most: int) -> Columns:
    """At most `most` evenly spaced rows, with the first and the last."""
    rows = len(columns.get("step", []))
    if rows <= most:
        return columns
    places = sorted({round(index * (rows - 1) / (most - 1)) for index in range(most)})
    return {name: [values[place] for place in places] for name, values in columns.items()}


def hardware_of(stages: Sequence[tuple[str, Attempt]]) -> Hardware | None:
    """Hardware samples of all stages one after another, or None without samples.

    Long recordings are averaged over equal slices of time. A row without values separates two stages, so that
    no line joins them.
    """
    per_stage = max(2, HARDWARE_POINTS // max(1, len(stages)))
    rows: list[dict[str, float | None]] = []
    bands: list[Band] = []
    begin = 0.0
    sliced = 1
    for name, attempt in stages:
        timed = (row for row in attempt.hardware if isinstance(row.get("time"), int | float))
        samples = sorted(timed, key=lambda row: float(row["time"]))
        first = samples[0]["time"] if samples else 0.0
        length = attempt.seconds or (samples[-1]["time"] - first if samples else 0.0)
        size = max(1, math.ceil(len(samples) / per_stage))
        sliced = max(sliced, size)
        for start in range(0, len(samples), size):
            part = samples[start : start + size]
            readings = columns_of_samples([_readings(row) for row in part])
            at = begin + math.fsum(row["time"] - first for row in part) / len(part)
            rows.append({"seconds": at, **{key: _mean(values) for key, values in readings.items()}})
        bands.append(Band(name, begin, begin + length))
        begin += length
        rows.append({"seconds": begin})
    columns = columns_of_samples(rows)
    if len(columns) < 2:
        return None
    note = "Sampled once a second while each run was active" + (
        f"; each point is the mean of up to {sliced} samples." if sliced > 1 else "."
    )
    return Hardware(_rounded(columns), bands, note)


def _readings(row: Mapping[str, Any]) -> dict[str, float | None]:
    cores = len(row.get("cpu_per_core") or ()) or None
    tree = row.get("tree") or {}
    if not tree.get("processes"):  # before or after the run
        tree = {}
    busy = tree.get("cpu_percent")
    readings = {
        "cpu": row.get("cpu_percent"),
        "process_cpu": busy / cores if busy is not None and cores else None,
        "rss": tree.get("rss"),
        "memory": row.get("memory_used"),
    }
    for gpu in row.get("gpus") or ():
        readings[f"gpu{gpu['index']}_utilisation"] = gpu.get("utilisation")
        readings[f"gpu{gpu['index']}_memory"] = gpu.get("memory_used")
    return readings


def columns_of_samples(rows: Sequence[Mapping[str, float | None]]) -> Columns:
    """Columns of the values that at least one row has."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
    return {name: [row.get(name) for row in rows] for name in names}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _rounded(columns: Columns) -> Columns:
    """Round to seven significant digits, to save bytes."""
    return {name: [_short(value) for value in values] for name, values in columns.items()}


def _short(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, float):
        return value if isinstance(value, int) else None
    return float(f"{value:.7g}") if math.isfinite(value) else None
