"""Stages as tables: `perilune runs` lists them, `perilune top` shows their live progress."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from perilune.cli.output import NARROW_COLUMNS, as_markup, make_console, wrap_text
from perilune.units import format_duration

if TYPE_CHECKING:
    from perilune.control.queries.lookup import StageStatus
    from perilune.control.runs.experiments import Control

COLUMNS = ("experiment", "stage", "state", "try", "progress", "left", "metrics", "time", "run")  # of `top`
BAR_WIDTH = 12  # characters


def print_runs(statuses: Sequence[StageStatus]) -> None:
    """Print stages in the given order, below their experiments."""
    from rich.table import Table

    console = make_console()
    names = max(len(status.name) for status in statuses)
    for _, stages in groupby(statuses, key=lambda status: status.experiment_id):
        members = list(stages)
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(min_width=min(names, 16) + 2, max_width=18, overflow="fold")
        table.add_column(min_width=10, overflow="fold")
        table.add_column(min_width=7, justify="right", no_wrap=True)
        table.add_column(ratio=1, overflow="fold")
        table.add_column(min_width=26, no_wrap=True)
        for status in members:
            attempts = f"attempt {status.attempts}" if status.attempts > 1 else ""
            outcome = ", ".join(part for part in (describe_result(status), attempts) if part)
            cells = (f"  {status.name}", state_text(status), _format_time(status.seconds), outcome)
            table.add_row(*map(as_markup, cells), status.run_id)
        console.print(as_markup(experiment_heading(members[0])))
        console.print(table)


def experiment_heading(status: StageStatus) -> str:
    """Describe the experiment of a stage: name, date of submission, id and overrides."""
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.submitted))
    return "  ".join((status.experiment, date, status.experiment_id, *status.overrides))


@dataclass(frozen=True, slots=True)
class LiveStage:
    """One stage as `top` shows it.

    Attributes:
        progress: the last progress report, with "done", "total", "unit" and "figures"; None before the first.
        seconds: time from the submission of the run until now, or until its end; None before.
    """

    status: StageStatus
    progress: dict[str, Any] | None
    seconds: float | None

    @property
    def share(self) -> float | None:
        """The share of the work that is done, from 0 to 1."""
        if self.progress is None or not self.progress["total"]:
            return None
        return min(1.0, float(self.progress["done"]) / float(self.progress["total"]))

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the end at the speed since the attempt's first report; None if unknown."""
        if self.progress is None or not (began := self.progress.get("began")):
            return None
        done = self.progress["done"] - began["done"]
        if done <= 0 or self.progress["done"] >= self.progress["total"]:
            return None
        rest = self.progress["total"] - self.progress["done"]
        return float(max(0.0, self.progress["time"] - began["time"]) / done * rest)

    def cells(self) -> tuple[str, ...]:
        """Return the texts of `COLUMNS`."""
        status, progress, left, metrics = self.status, "", "", ""
        if status.state == "active" and self.progress is not None and self.share is not None:
            full = round(self.share * BAR_WIDTH)
            bar = "━" * full + "─" * (BAR_WIDTH - full)
            progress = f"{bar} {self.progress['done']:,}/{self.progress['total']:,}"
            left = _format_time(self.seconds_left)
            metrics = " ".join(f"{name} {value:.3g}" for name, value in self.progress["figures"].items())
        return (
            status.experiment,
            status.name,
            state_text(status),
            str(status.attempts or ""),
            progress,
            left,
            metrics or describe_result(status),
            _format_time(self.seconds),
            status.run_id,
        )

    def document(self) -> dict[str, Any]:
        return self.status.document() | {"progress": self.progress, "elapsed": self.seconds}


def live_stages(control: Control, experiments: int, *, refresh: bool = True) -> list[LiveStage]:
    """Return the stages of the latest experiments, the newest experiment first.

    With `refresh`, first check the state of all live runs.
    """
    from perilune.control.queries.lookup import latest_experiments, stage_statuses
    from perilune.control.runs.experiments import read_progress

    if refresh:
        control.reconciler.reconcile_all(act=False)
    latest = latest_experiments(control, experiments)
    statuses = stage_statuses(control, latest)
    now = time.time()
    return [
        LiveStage(
            status,
            read_progress(status.attempt_dir) if status.attempt_dir and status.state == "active" else None,
            status.seconds
            if status.seconds is not None
            else status.created and max(0.0, now - status.created),
        )
        for experiment in latest
        for status in statuses
        if status.experiment_id == experiment
    ]


def make_live_table(stages: Sequence[LiveStage], width: int) -> Any:
    """Return the live table for rich, under the names of experiments and without the ids of runs.

    Args:
        width: columns of the terminal. Narrow terminals show the cells as text.
    """
    from rich.console import Group
    from rich.table import Table

    parts: list[Any] = []
    for _, group in groupby(stages, key=lambda stage: stage.status.experiment_id):
        members = list(group)
        parts.append(as_markup(experiment_heading(members[0].status)))
        if width < NARROW_COLUMNS:
            parts += [as_markup(wrap_text(f"  {_describe_live(member)}", indent=4)) for member in members]
            continue
        table = Table(box=None, pad_edge=False, show_header=False)
        for name in COLUMNS[1:-1]:
            table.add_column(no_wrap=name != "metrics", overflow="fold")
        for member in members:
            stage, *cells = map(as_markup, member.cells()[1:-1])
            table.add_row(f"  {stage}", *cells)
        parts.append(table)
    return Group(*parts or [as_markup("no runs yet; try: perilune quickstart")])


def _describe_live(stage: LiveStage) -> str:
    """Return the cells of a stage that are not empty, with the names of numbers."""
    cells = zip(COLUMNS[1:-1], stage.cells()[1:-1], strict=True)
    return ", ".join(
        f"{name} {cell}" if name in ("try", "left", "time") else cell for name, cell in cells if cell
    )


def state_text(status: StageStatus) -> str:
    return status.display_state + describe_doubts(
        status.state, status.reachability, status.cleanup, bool(status.conditions)
    )


def describe_doubts(state: str, reachability: str, cleanup: str, error: bool = False) -> str:
    """Describe the doubts about a state; `error` means that the last pass over the run failed."""
    if error:
        return ", error"
    if cleanup == "pending":
        return ", not proven to have stopped" if state in {"lost", "cancelled"} else ", cleanup pending"
    return ", unreachable" if reachability == "unreachable" and cleanup != "done" else ""


def describe_result(status: StageStatus) -> str:
    """Return the most important value of a stage's summary, or the cause of its failure."""
    score = status.summary.get("pass@1")
    if score:
        return f"pass@1 {format_interval(score)}"
    for figure in ("rows", "steps"):
        if figure in status.summary:
            held_out = status.summary.get("held_out")
            last = f", {_last_evaluation(held_out)}" if held_out else ""
            return f"{status.summary[figure]} {figure}{last}"
    return status.cause


def _last_evaluation(held_out: Mapping[str, Any]) -> str:
    name, details = next(iter(held_out["sets"].items()))
    last = held_out["curve"][-1][name]
    text = format_interval(last) if details["figure"] == "pass@1" else f"{last['mean']:.4g}"
    return f"{name} {details['figure']} {text}"


def format_interval(value: Mapping[str, float]) -> str:
    """Return a share with its interval: 41.0% (38.2% to 44.1%)."""
    return f"{value['mean']:.1%} ({value['low']:.1%} to {value['high']:.1%})"


def _format_time(seconds: float | None) -> str:
    return "" if seconds is None else format_duration(seconds)
