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
    total = math.fsum(one.seconds or 0.0 for one in stages)
    for one in stages:
        if one.seconds is not None:
            bar = {"bar": (begin, begin + one.seconds), "color": TASK_COLORS.get(one.task, 7)}
            share = {"name": one.task, "value": format_percent(one.seconds / (total or 1.0))}
            rows.append(
                {"label": one.name, "value": format_duration(one.seconds), "marks": [bar], "details": [share]}
            )
            begin += one.seconds
    x = {"as": "clock", "domain": (0, total or 1.0), "label": "time in stages, end to end"}
    title = f"Stages, {format_duration(total)} in all"
    return (
        [{"kind": "rows", "key": "timeline", "title": title, "rowHeight": 28, "x": x, "rows": rows}]
        if rows
        else []
    )


def part_time_charts(stages: Sequence[tuple[str, Mapping[str, float] | None]]) -> list[Figure]:
    """Return a chart of step time by part; `stages` are (name, seconds by part)."""
    totals = [(name, found, math.fsum(found.values())) for name, found in stages if found is not None]
    rows = []
    for name, found, total in totals:
        marks = []
        begin = 0.0
        for part, color in PART_COLORS.items():
            marks.append({"bar": (begin, begin + found[part]), "color": color})
            begin += found[part]
        details = [
            {
                "name": part,
                "color": color,
                "value": f"{format_duration(found[part])} · {format_percent(found[part] / total)}",
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
