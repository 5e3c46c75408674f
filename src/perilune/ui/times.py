"""Charts of the time of the stages."""

import math
from collections.abc import Mapping, Sequence

from perilune.metrics.training import STEP_PARTS
from perilune.ui.figures import Figure
from perilune.ui.headline import format_percent
from perilune.ui.overview import Stage, format_duration

PART_COLORS = dict(zip(STEP_PARTS, (1, 5, 2, 7), strict=True))
TASK_COLORS = {"sft": 1, "rl": 2, "evaluate": 3}


def timeline_charts(stages: Sequence[Stage]) -> list[Figure]:
    """Return the stages on one time axis, end to end."""
    rows = []
    begin = 0.0
    total = math.fsum(run.seconds or 0.0 for run in stages)
    for run in stages:
        if run.seconds is not None:
            bar = {"bar": (begin, begin + run.seconds), "color": TASK_COLORS.get(run.task, 7)}
            share = {"name": run.task, "value": format_percent(run.seconds / (total or 1.0))}
            rows.append(
                {"label": run.name, "value": format_duration(run.seconds), "marks": [bar], "details": [share]}
            )
            begin += run.seconds
    x = {"as": "clock", "domain": (0, total or 1.0), "label": "time in stages, end to end"}
    title = f"Stages, {format_duration(total)} in all"
    figure = {"kind": "rows", "key": "timeline", "title": title, "rowHeight": 28, "x": x, "rows": rows}
    return [figure] if rows else []


def part_time_charts(stages: Sequence[tuple[str, Mapping[str, float] | None]]) -> list[Figure]:
    """Return a chart of step time by part; `stages` are (name, seconds by part)."""
    totals = [(name, seconds, math.fsum(seconds.values())) for name, seconds in stages if seconds is not None]
    rows = []
    for name, seconds, total in totals:
        marks = []
        begin = 0.0
        for part, color in PART_COLORS.items():
            marks.append({"bar": (begin, begin + seconds[part]), "color": color})
            begin += seconds[part]
        details = [
            {
                "name": part,
                "color": color,
                "value": f"{format_duration(seconds[part])} · {format_percent(seconds[part] / total)}",
            }
            for part, color in PART_COLORS.items()
        ]
        rows.append({"label": name, "value": format_duration(total), "marks": marks, "details": details})
    figure = {
        "kind": "rows",
        "key": "split",
        "title": "Time by part",
        "legend": [{"name": part, "color": color} for part, color in PART_COLORS.items()],
        "note": "Without start-up, loading and saving.",
        "x": {"as": "clock", "domain": (0, 1.02 * max((total for *_, total in totals), default=1.0))},
        "rows": rows,
    }
    return [figure] if rows else []
