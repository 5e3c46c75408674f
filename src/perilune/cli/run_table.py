"""Runs as a table: one line a stage, or under the name of its experiment where the terminal is narrow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from perilune.cli.console import duration
from perilune.cli.output import as_markup

if TYPE_CHECKING:
    from rich.table import Table

    from perilune.control.queries.lookup import StageStatus

NARROW = 120  # columns below which experiments become headings
UNLIMITED = 160  # columns where there is no terminal


def print_runs(statuses: Sequence[StageStatus]) -> None:
    """Print stages by experiment, in the order in which they are given."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        Console(highlight=False, width=UNLIMITED).print(_flat(statuses))
    elif console.width >= NARROW:
        console.print(_flat(statuses))
    else:
        for experiment, table in _by_experiment(statuses):
            console.print(as_markup(experiment))
            console.print(table)


def _flat(statuses: Sequence[StageStatus]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("experiment", "stage", "task", "state", "attempts", "time", "result", "run"):
        table.add_column(name, no_wrap=name != "result")
    for status in statuses:
        row = (status.experiment, status.name, status.task, _state(status), str(status.attempts or ""))
        table.add_row(*map(as_markup, (*row, _time(status), result(status))), status.run_id)
    return table


def _by_experiment(statuses: Sequence[StageStatus]) -> Iterator[tuple[str, Table]]:
    from rich.table import Table

    names = max(len(status.name) for status in statuses)
    for experiment, stages in groupby(statuses, key=lambda status: (status.experiment_id, status.experiment)):
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(min_width=min(names, 16) + 2, max_width=18, overflow="fold")
        table.add_column(min_width=10, overflow="fold")
        table.add_column(min_width=7, justify="right", no_wrap=True)
        table.add_column(ratio=1, overflow="fold")
        table.add_column(min_width=26, no_wrap=True)
        for status in stages:
            tried = f"attempt {status.attempts}" if status.attempts > 1 else ""
            said = ", ".join(part for part in (result(status), tried) if part)
            cells = (f"  {status.name}", _state(status), _time(status), said)
            table.add_row(*map(as_markup, cells), status.run_id)
        yield experiment[1], table


def _state(status: StageStatus) -> str:
    return status.shown + doubts(status.state, status.reachability, status.cleanup, bool(status.conditions))


def _time(status: StageStatus) -> str:
    return duration(status.seconds) if status.seconds is not None else ""


def doubts(state: str, reachability: str, cleanup: str, error: bool = False) -> str:
    """What is not sure of a state, or not done yet; `error` when an error is in the way."""
    if error:
        return ", error"
    if cleanup == "pending":
        return ", not proven to have stopped" if state in {"lost", "cancelled"} else ", cleanup pending"
    return ", unreachable" if reachability == "unreachable" and cleanup != "done" else ""


def result(status: StageStatus) -> str:
    """The figure that says most of what a stage made, or why it made nothing."""
    score = status.summary.get("pass@1")
    if score:
        return f"pass@1 {interval(score)}"
    for figure in ("rows", "steps"):
        if figure in status.summary:
            return f"{status.summary[figure]} {figure}"
    return status.cause


def interval(value: Mapping[str, float]) -> str:
    """A share with its interval: 41.0% (38.2% to 44.1%)."""
    return f"{value['mean']:.1%} ({value['low']:.1%} to {value['high']:.1%})"
