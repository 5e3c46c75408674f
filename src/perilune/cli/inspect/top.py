"""`perilune top`: running stages, live in the terminal."""

import sys
from typing import Annotated

import typer

from perilune.cli.arguments import Json, open_control
from perilune.cli.inspect.run_table import COLUMNS, live_stages, print_live
from perilune.cli.output import echo, print_json
from perilune.errors import RequestError


def top(
    experiments: Annotated[
        int, typer.Option("--last", "-n", min=1, help="Number of the latest experiments to show.")
    ] = 10,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two refreshes.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the table once, as text.")] = False,
    as_json: Json = False,
) -> None:
    """Show running stages live: progress, metrics, time left, and the log of the selected run.

    Keys: arrows select a run, c copies its id (with OSC 52, so also through SSH), l shows its log, e explains
    its state, x twice cancels it, q exits. Runs continue when you exit.

    \b
    perilune top
    perilune top --once
    """
    live = not (as_json or once) and sys.stdout.isatty()
    control = open_control(refresh=not live)
    if live:
        try:
            from perilune.cli.inspect.top_screen import Screen
        except ImportError:
            raise RequestError(
                "the live table needs the package textual",
                remedy="pip install 'perilune[top]', or perilune top --once",
            ) from None
        Screen(control, experiments, every).run()
        return
    stages = live_stages(control, experiments, refresh=False)
    if as_json:
        print_json({"runs": [stage.document() for stage in stages]})
    elif sys.stdout.isatty():
        print_live(stages)
    else:
        for row in ([*COLUMNS], *(stage.cells() for stage in stages)):
            echo("\t".join(row))
