"""`perilune simulate`: predict the RL stages of a recipe before they run, here or on other machines."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.arguments import Json, RecipeArgument, SetOption, check_output_file
from perilune.cli.output import echo, make_console, print_json
from perilune.errors import RequestError
from perilune.files import write_atomic, write_json
from perilune.units import format_duration

if TYPE_CHECKING:
    from perilune.simulate.run import RunResult


COLUMNS = ("stage", "setting", "time", "sampling", "learning", "idle", "mean age", "peak blocks", "cost")
TENTHS_BELOW_S = 600.0  # seconds, below which tenths are shown


def simulate(
    recipe: RecipeArgument,
    *,
    set_: SetOption = None,
    machines: Annotated[
        str,
        typer.Option(
            metavar="SPEC",
            help="Other machines: COUNTxCARD, optionally /CARDS PER MODEL and @PRICE PER CARD AND HOUR, "
            "such as 8xH100/2@2.50. Default: this machine, as calibrated.",
        ),
    ] = "",
    staleness: Annotated[
        str, typer.Option(metavar="LIST", help="Values to compare: sync,0,1,2. Default: the recipe's.")
    ] = "",
    wait: Annotated[
        float, typer.Option(min=0, max=1e6, help="Mean seconds that an answer waits for a tool or a judge.")
    ] = 0.0,
    wait_spread: Annotated[
        float, typer.Option(min=0, max=10, help="Sigma of the lognormal distribution of that wait.")
    ] = 1.0,
    wait_metric: Annotated[
        str, typer.Option(metavar="NAME", help="Take the waits from this metric of the recorded episodes.")
    ] = "",
    episodes: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Take the lengths from the episodes in this folder. Default: from the last finished run of "
            "the same stage. If there is none, the lengths are assumed.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the drawn lengths and waits.")] = 0,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=check_output_file,
            help="Also write a Chrome trace (chrome://tracing, Perfetto).",
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=check_output_file, help="Also write a page with the table and charts."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict the RL stages of a recipe: time, idle shares of learner and workers, staleness, cache and cost.

    The simulation runs the real scheduler, block pools and admission rule. Only the times are predicted: for
    this machine from the measurements of `perilune calibrate`, for other machines from the published
    bandwidth and FLOPs of the GPU.

    \b
    perilune simulate quickstart
    perilune simulate quickstart --staleness sync,1,2 --wait 0.2
    perilune simulate my.yaml --machines 2xH100@2.50 --page prediction.html
    """
    from perilune.plan.simulated_recipe import Options, simulate_recipe
    from perilune.recipe.load import load_recipe
    from perilune.simulate.hardware import parse_machines

    options = Options(
        parse_machines(machines) if machines else None,
        _settings(staleness),
        wait,
        wait_spread,
        wait_metric,
        episodes,
        seed,
    )
    document, results = simulate_recipe(load_recipe(recipe, set_ or ()), options)
    if trace is not None:
        write_json(trace, chrome_trace(results))
    if page is not None:
        write_atomic(page, _render_page(document, results))
    if as_json:
        print_json(document)
        return
    show(document)
    if trace is not None:
        echo(f"wrote {trace}: open it in chrome://tracing or ui.perfetto.dev", err=True)
    if page is not None:
        echo(f"wrote {page}: open it in a browser", err=True)


def _settings(text: str) -> tuple[int | None, ...]:
    """Return the settings to compare: None is synchronous."""
    settings: list[int | None] = []
    for word in filter(None, text.split(",")):
        if word != "sync" and not re.fullmatch("[0-9]{1,3}", word):
            raise RequestError(
                f"{word!r} is not a staleness", where="--staleness", remedy="give a list such as sync,0,1,2"
            )
        settings.append(None if word == "sync" else int(word))
    return tuple(settings)


def show(document: Mapping[str, Any]) -> None:
    """Print the predictions as tables."""
    from rich.table import Table

    console = make_console()
    echo(f"{document['recipe']}: {document['machines']}")
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("stage", "setting", "idle") else "right")
    for row in document["stages"]:
        table.add_row(*_row(row))
    console.print(table)
    for text in _lengths(document):
        echo(f"  {text}")
    for note in document["notes"]:
        echo(f"note: {note}")
    sys.stdout.flush()


def _render_page(document: Mapping[str, Any], results: Sequence[tuple[str, RunResult]]) -> str:
    from perilune.cli.train.simulation_page import render_simulation, run_figures

    rows = [_row(row) for row in document["stages"]]
    notes = [*_lengths(document), *document["notes"]]
    title = f"{document['recipe']}, simulated"
    figures = run_figures(results)
    return render_simulation(
        title, document["machines"], columns=COLUMNS, rows=rows, figures=figures, notes=notes
    )


def _lengths(document: Mapping[str, Any]) -> list[str]:
    return [f"{row['stage']}, {row['setting']}: lengths: {row['lengths']}" for row in document["stages"]]


def _row(row: Mapping[str, Any]) -> list[str]:
    idle = ", ".join(f"{name} {share:.0%}" for name, share in row["idle"].items())
    used, total = row["peak_blocks"]
    cost = "" if row["cost"] is None else f"{row['cost']:.2f}"
    parts = (_format_time(row[part]) for part in ("seconds", "sampling", "learning"))
    age = f"{row['mean_age']:.2f}"
    return [row["stage"], row["setting"], *parts, idle, age, f"{used:,} of {total:,}", cost]


def _format_time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < TENTHS_BELOW_S else format_duration(seconds)


def chrome_trace(results: Sequence[tuple[str, RunResult]]) -> dict[str, Any]:
    """Return the work of all processes in the Trace Event Format: complete events, in microseconds."""
    events: list[dict[str, Any]] = []
    for number, (name, result) in enumerate(results):
        rows = {
            process: row for row, process in enumerate(dict.fromkeys(span.process for span in result.spans))
        }
        events.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}})
        events += [
            {"ph": "M", "pid": number, "tid": row, "name": "thread_name", "args": {"name": process}}
            for process, row in rows.items()
        ]
        events += [
            {
                "ph": "X",
                "pid": number,
                "tid": rows[span.process],
                "name": span.name,
                "ts": round(1e6 * span.begin, 3),
                "dur": round(1e6 * (span.end - span.begin), 3),
            }
            for span in result.spans
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
