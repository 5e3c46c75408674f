"""The charts of training curves, chosen from charts.yaml by the columns that a stage has."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from perilune.ui.attempt import Columns

LOSS_NOTES = {
    "sft": "Mean cross-entropy of the trace's tokens, in nats. 0 means certainty.",
    "preference": "Mean over the pairs of the step, and over the held-out pairs.",
    "reward_model": "Mean over the step's pairs, in nats. 0.69 means chance.",
    "distill": "Mean over the tokens that the student sampled.",
}
EQUAL_REWARD_NOTE = (
    "Mean over the step's samples. Reward and pass rate are equal here: the reward is 1 for a right answer "
    "and 0 otherwise."
)


@dataclass(frozen=True, slots=True)
class CurveChart:
    """One chart. `series` has (column, name in the legend, color); charts.yaml explains the other fields."""

    key: str
    title: str
    note: str
    y: str
    series: list[tuple[str, str, int]]


@cache
def _load_catalogue() -> list[dict[str, Any]]:
    import yaml

    charts: list[dict[str, Any]] = yaml.safe_load((files("perilune.ui") / "charts.yaml").read_text("utf-8"))
    return charts


def select_charts(task: str, columns: Columns) -> list[CurveChart]:
    """Return the charts of a stage of task `task`, each with the series that have a value."""
    present = [name for name, values in columns.items() if any(value is not None for value in values)]
    charts = []
    for chart in _load_catalogue():
        if "needs" in chart and not _match_columns(chart["needs"], present):
            continue
        series = _select_series(chart["series"], present)
        note, y = chart["note"], chart.get("y", "")
        if chart["key"] == "loss":
            if task in ("rl", "selfplay"):  # their objective says nothing about progress
                continue
            note, y = LOSS_NOTES.get(task, note), "" if task == "distill" else y
        if chart["key"] == "reward" and columns.get("reward") == columns.get("pass_rate"):
            series, note, y = series[:1], EQUAL_REWARD_NOTE, "share"
        if series:
            charts.append(CurveChart(chart["key"], chart["title"], note, y, series))
    return charts


def _select_series(declared: Mapping[str, list[Any]], present: Collection[str]) -> list[tuple[str, str, int]]:
    return [
        (column, name.replace("*", star), colors[index % len(colors)])
        for pattern, (name, *colors) in declared.items()
        for index, (column, star) in enumerate(_match_columns(pattern, present))
    ]


def _match_columns(pattern: str, present: Collection[str]) -> list[tuple[str, str]]:
    """Return the columns that match a pattern and that no chart names, each with the text of the star."""
    if "*" not in pattern:
        return [(pattern, "")] if pattern in present else []
    form = re.compile(re.escape(pattern).replace(r"\*", "([^/]+)"))
    named = {column for chart in _load_catalogue() for column in chart["series"]}
    return [(name, match[1]) for name in present if name not in named and (match := form.fullmatch(name))]
