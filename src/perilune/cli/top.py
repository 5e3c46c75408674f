"""`perilune top`: what is under way, live, in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.arguments import Json, open_control
from perilune.cli.console import duration
from perilune.cli.output import echo, print_json
from perilune.errors import RequestError

if TYPE_CHECKING:
    from perilune.control.queries.lookup import StageStatus
    from perilune.control.runs.experiments import Control

COLUMNS = ("experiment", "stage", "state", "try", "progress", "left", "figures", "time", "run")


@dataclass(frozen=True, slots=True)
class Row:
    """One stage as `top` shows it.

    Attributes:
        status: as recorded.
        progress: what its task last said, with "done", "total", "unit" and "figures"; None before that.
        seconds: since it was submitted, or from then to its end; None when it has not been begun.
    """

    status: StageStatus
    progress: dict[str, Any] | None
    seconds: float | None

    @property
    def share(self) -> float | None:
        """How much of it is done, from 0 to 1."""
        if self.progress is None or not self.progress["total"]:
            return None
        return min(1.0, float(self.progress["done"]) / float(self.progress["total"]))

    def cells(self) -> tuple[str, ...]:
        """What stands in its columns."""
        from perilune.cli.run_table import doubts, result

        status, live = self.status, self.status.state == "active"
        progress = left = figures = ""
        if live and self.progress is not None and self.share is not None:
            progress = f"{_bar(self.share)} {self.progress['done']:,}/{self.progress['total']:,}"
            if self.seconds and 0 < self.share < 1:
                left = duration(self.seconds / self.share - self.seconds)
            figures = " ".join(f"{name} {value:.3g}" for name, value in self.progress["figures"].items())
        return (
            status.experiment,
            status.name,
            status.shown + doubts(status.state, status.reachability, status.cleanup, bool(status.conditions)),
            str(status.attempts or ""),
            progress,
            left,
            figures or result(status),
            "" if self.seconds is None else duration(self.seconds),
            status.run_id,
        )


def rows(control: Control, experiments: int, *, now: float | None = None, look: bool = True) -> list[Row]:
    """The stages of the latest experiments, the newest experiment first, after a look at all that lives."""
    from perilune.control.queries.lookup import latest_experiments, stage_statuses
    from perilune.control.runs.experiments import read_progress

    if look:
        control.reconciler.all(act=False)
    latest = latest_experiments(control, experiments)
    found = stage_statuses(control, latest)
    clock = time.time() if now is None else now
    return [
        Row(
            status,
            read_progress(status.attempt_dir) if status.attempt_dir and status.state == "active" else None,
            status.seconds if status.seconds is not None else status.created and clock - status.created,
        )
        for experiment in latest
        for status in found
        if status.experiment_id == experiment
    ]


def top(
    experiments: Annotated[
        int, typer.Option("--last", "-n", min=1, help="Of the experiments submitted last, so many.")
    ] = 10,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the table once, as text.")] = False,
    as_json: Json = False,
) -> None:
    """Show what is under way, live: progress, figures, time left, and the log of the chosen run.

    Keys: arrows choose a run, c copies its id to the clipboard of the machine you sit at (OSC 52, through SSH
    too), l shows its log, e explains its state, x twice cancels it, q leaves. Runs do not depend on it.

    \b
    perilune top
    perilune top --once
    """
    live = not (as_json or once) and sys.stdout.isatty()
    control = open_control(look=not live)
    if as_json:
        print_json({"runs": [_document(row) for row in rows(control, experiments, look=False)]})
    elif once and sys.stdout.isatty():
        _print(rows(control, experiments, look=False))
    elif not live:
        for row in ([*COLUMNS], *(row.cells() for row in rows(control, experiments, look=False))):
            echo("\t".join(row))
    else:
        try:
            from perilune.cli.top_screen import Screen
        except ImportError:
            raise RequestError(
                "the live table needs a package", remedy="pip install 'perilune[top]', or perilune top --once"
            ) from None
        Screen(control, experiments, every).run()


def _print(found: Sequence[Row]) -> None:
    """The table for people, under the names of experiments, without their runs' ids."""
    from rich.console import Console
    from rich.table import Table

    from perilune.cli.output import as_markup

    console = Console(highlight=False)
    for (_, experiment), stages in groupby(
        found, key=lambda row: (row.status.experiment_id, row.status.experiment)
    ):
        table = Table(box=None, pad_edge=False, show_header=False)
        for name in COLUMNS[1:-1]:
            table.add_column(no_wrap=name != "figures", overflow="fold")
        for row in stages:
            stage, *cells = map(as_markup, row.cells()[1:-1])
            table.add_row(f"  {stage}", *cells)
        console.print(as_markup(experiment))
        console.print(table)


def _document(row: Row) -> dict[str, Any]:
    return row.status.document() | {"progress": row.progress, "elapsed": row.seconds}


def _bar(share: float, width: int = 12) -> str:
    full = round(share * width)
    return "━" * full + "─" * (width - full)
