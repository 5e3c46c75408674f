"""The pages of simulated runs and fleets: a table of predictions, and charts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from perilune.metrics.training import STEP_PARTS
from perilune.simulate.run import RunResult, Span
from perilune.simulate.serving import Served
from perilune.ui.figures import Figure
from perilune.ui.report import CHART_SCRIPTS, render_page

SCRIPTS = (*CHART_SCRIPTS, "simulation.js")
SHOWN_STEPS = 8  # training steps in a timeline
SHOWN_PARTS = 60  # equal parts of a trace, or quantiles of a distribution, in a chart
COLORS = {"sample": 1, "learn": 2, "score": 3, "record": 4, "evaluate": 5}
QUANTILES = ((50, "median"), (99, "P99"))
KINDS = {"setting": "text", "idle": "text wide", "value": "text"}  # of columns; others are numbers


def render_simulation(
    title: str,
    lead: str,
    *,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    figures: Sequence[Figure],
    notes: Sequence[str] = (),
) -> str:
    """Return a self-contained page; the first column has the names of the rows."""
    kinds = ["header", *(KINDS.get(column, "") for column in columns[1:])]
    document = {
        "title": title,
        "lead": lead,
        "columns": list(zip(columns, kinds, strict=True)),
        "rows": rows,
        "figures": figures,
        "notes": notes,
    }
    return render_page(title, SCRIPTS, document)


def run_figures(results: Sequence[tuple[str, RunResult]]) -> list[Figure]:
    """Return the charts of simulated stages: the time of each step, and who worked when at the beginning."""
    series = [
        {
            "name": name,
            "color": number % 6 + 1,
            "x": list(range(1, len(result.steps) + 1)),
            "y": [sum(step.get(part, 0.0) for part in STEP_PARTS) for step in result.steps],
        }
        for number, (name, result) in enumerate(results)
    ]
    steps = {
        "kind": "lines",
        "key": "steps",
        "title": "Seconds of each training step",
        "height": 220,
        "x": {"as": "integer", "label": "step", "name": "step"},
        "y": {"as": "short"},
        "showLegend": True,
        "series": series,
    }
    return [steps, *(_timeline(name, result) for name, result in results)]


def _timeline(name: str, result: RunResult) -> Figure:
    """Return one row for each process, with its work until the end of training step `SHOWN_STEPS`."""
    ends = [span.end for span in result.spans if span.name == "learn"]
    end = ends[min(SHOWN_STEPS, len(ends)) - 1]
    spans = [span for span in result.spans if span.begin < end]
    begin = min(span.begin for span in spans)
    spans = [replace(span, begin=span.begin - begin, end=span.end - begin) for span in spans]
    kinds = {span.name for span in spans}
    return {
        "kind": "rows",
        "key": f"timeline {name}",
        "title": f"{name}: the first {min(SHOWN_STEPS, len(ends))} of {len(ends)} steps",
        "note": "A gap means that the process waits. The percentage is its idle time in the whole stage.",
        "legend": [{"name": kind, "color": color} for kind, color in COLORS.items() if kind in kinds],
        "x": {"as": "short", "domain": [0.0, end - begin], "label": "seconds after the first work"},
        "rows": [
            _timeline_row(process, idle, [span for span in spans if span.process == process])
            for process, idle in result.idle_shares().items()
        ],
    }


def _timeline_row(process: str, idle: float, spans: Sequence[Span]) -> Mapping[str, Any]:
    seconds = {kind: sum(span.end - span.begin for span in spans if span.name == kind) for kind in COLORS}
    return {
        "label": process,
        "value": f"{idle:.0%} idle",
        "marks": [{"bar": [span.begin, span.end], "color": COLORS[span.name]} for span in spans],
        "details": [
            {"name": kind, "value": f"{total:.3g} s", "color": COLORS[kind]}
            for kind, total in seconds.items()
            if total
        ],
    }


def serving_figures(served: Sequence[Served]) -> list[Figure]:
    """Return the charts of a served trace: latencies over time, and their distributions."""
    times = np.array([request.arrival.time for request in served])
    measures = {
        "time to first token": np.array([request.ttft for request in served]),
        "latency": np.array([request.end - request.arrival.time for request in served]),
    }
    edges = np.linspace(times.min(), times.max(), SHOWN_PARTS + 1)
    part = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, SHOWN_PARTS - 1)
    parts = [number for number in range(SHOWN_PARTS) if (part == number).any()]
    middles = ((edges[:-1] + edges[1:]) / 2)[parts].tolist()
    shares = np.linspace(0, 100, SHOWN_PARTS + 1)
    over_time, spread = [], []
    for measure, (name, values) in enumerate(measures.items()):
        for number, (share, label) in enumerate(QUANTILES):
            y = [float(np.percentile(values[part == index], share)) for index in parts]
            look = {"name": f"{name}, {label}", "color": 1 + 2 * measure + number}
            over_time.append(look | {"x": middles, "y": y})
        y = np.percentile(values, shares).tolist()
        spread.append({"name": name, "color": 1 + 2 * measure, "x": (shares / 100).tolist(), "y": y})
    frame = {"kind": "lines", "height": 220, "y": {"as": "short"}, "showLegend": True}
    return [
        {
            **frame,
            "key": "over time",
            "title": "Seconds by time of arrival",
            "x": {"as": "clock", "label": "arrival", "name": "arrival"},
            "series": over_time,
        },
        {
            **frame,
            "key": "distribution",
            "title": "Seconds of which share of the requests",
            "note": "At 90%, nine of ten requests take at most these seconds.",
            "x": {"as": "share", "label": "share of requests", "name": "share"},
            "series": spread,
        },
    ]
