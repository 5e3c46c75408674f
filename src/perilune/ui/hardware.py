"""Charts of the load of the machine while the stages ran."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from perilune.ui.attempt import Attempt, Columns
from perilune.ui.curves import round_columns
from perilune.ui.figures import Figure

MAX_POINTS = 600


@dataclass(frozen=True, slots=True)
class Hardware:
    """Charts of load and memory, on a time axis with the stages one after another."""

    note: str
    figures: list[Figure]


def collect_hardware(stages: Sequence[tuple[str, Attempt]]) -> Hardware | None:
    """Return the hardware samples of all stages one after another, or None without samples.

    Long recordings are averaged over equal slices of time. A row without values separates two stages, so that
    no line joins them.
    """
    per_stage = max(2, MAX_POINTS // max(1, len(stages)))
    rows: list[dict[str, float | None]] = []
    bands: list[Mapping[str, Any]] = []
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
            readings = to_sample_columns([_readings(row) for row in part])
            seconds = begin + math.fsum(row["time"] - first for row in part) / len(part)
            rows.append({"seconds": seconds, **{key: _mean(values) for key, values in readings.items()}})
        bands.append({"name": name, "begin": begin, "end": begin + length})
        begin += length
        rows.append({"seconds": begin})
    columns = to_sample_columns(rows)
    if len(columns) < 2:
        return None
    note = "Sampled once a second while each run was active" + (
        f"; each point is the mean of up to {sliced} samples." if sliced > 1 else "."
    )
    return Hardware(note, _hardware_charts(round_columns(columns), bands))


def _hardware_charts(columns: Columns, bands: Sequence[Mapping[str, Any]]) -> list[Figure]:
    gpus = [name.removesuffix("_utilisation") for name in columns if name.endswith("_utilisation")]
    load: Figure = {"as": "load", "domain": (0, 112)}

    def chart(key: str, title: str, note: str, y: Figure, names: Sequence[tuple[str, str, int]]) -> Figure:
        series = [
            {"name": name, "x": columns["seconds"], "y": columns[column], "color": color}
            for column, name, color in names
            if column in columns
        ]
        x = {"as": "clock", "label": "time in stages, end to end", "name": "at"}
        look = {"kind": "lines", "group": "hardware", "height": 200, "showLegend": True, "bands": bands}
        return {**look, "key": key, "title": title, "note": note, "x": x, "y": y, "series": series}

    def gpu_series(reading: str) -> list[tuple[str, str, int]]:
        return [(f"{name}_{reading}", name, index % 8 + 1) for index, name in enumerate(gpus)]

    charts = [
        chart(
            "cpu",
            "Processor",
            "Percent of all cores. Includes other work of the machine.",
            load,
            [("process_cpu", "this run", 1), ("cpu", "whole machine", 7)],
        ),
        chart(
            "memory",
            "Memory",
            "Resident memory of the processes of the run, and the memory that the machine used in total.",
            {"as": "bytes"},
            [("rss", "this run", 1), ("memory", "whole machine", 7)],
        ),
        chart("gpu", "GPU use", "", load, gpu_series("utilisation")),
        chart("gpu-memory", "GPU memory", "", {"as": "bytes"}, gpu_series("memory")),
    ]
    return [figure for figure in charts if figure["series"]]


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


def to_sample_columns(rows: Sequence[Mapping[str, float | None]]) -> Columns:
    """Return columns of the values that at least one row has."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
    return {name: [row.get(name) for row in rows] for name in names}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
