"""`perilune top`: running stages, live in the terminal."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from perilune.cli.arguments import Json, open_control
from perilune.cli.inspect.run_table import COLUMNS, live_stages, make_live_table
from perilune.cli.output import as_markup, echo, make_console, print_json
from perilune.errors import PeriluneError

if TYPE_CHECKING:
    from perilune.control.runs.experiments import Control


def top(
    experiments: Annotated[
        int, typer.Option("--last", "-n", min=1, help="Number of the latest experiments to show.")
    ] = 10,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two refreshes.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the table once, as text.")] = False,
    as_json: Json = False,
) -> None:
    """Show running stages live: progress, metrics and time left, until Ctrl-C.

    Runs continue when you exit. Rows that do not fit into the terminal are left out (see --last).
    `perilune logs EXPERIMENT/STAGE` shows the log of one, `perilune explain` its state.

    \b
    perilune top
    perilune top --once
    """
    live = not (as_json or once) and sys.stdout.isatty()
    control = open_control(refresh=not live)
    if live:
        with suppress(KeyboardInterrupt):
            _watch(control, experiments, every)
        return
    stages = live_stages(control, experiments, refresh=False)
    if as_json:
        print_json({"runs": [stage.document() for stage in stages]})
    elif sys.stdout.isatty():
        console = make_console()
        console.print(make_live_table(stages, console.width))
    else:
        for row in ([*COLUMNS], *(stage.cells() for stage in stages)):
            echo("\t".join(row))


def _watch(control: Control, experiments: int, every: float) -> NoReturn:
    """Show the table, read again every `every` seconds. It only watches; runs do not depend on it."""
    from rich.live import Live

    console = make_console()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                shown = make_live_table(live_stages(control, experiments), console.width)
            except PeriluneError as error:
                shown = as_markup(str(error))
            live.update(shown, refresh=True)
            time.sleep(every)
