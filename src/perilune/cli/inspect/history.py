"""Commands about causes and changes: explain a run, print recorded events, compare two runs."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.arguments import RUN_HELP, Json, RunOrExperiment, open_control
from perilune.cli.output import echo, print_json, wrap_text
from perilune.errors import RequestError

if TYPE_CHECKING:
    from perilune.control.queries.explanation import Explanation
    from perilune.control.record.store import Event, Run
    from perilune.control.runs.experiments import Control

POLL_SECONDS = 0.5  # seconds between two reads of `events --follow`


def explain(target: RunOrExperiment, as_json: Json = False) -> None:
    """Explain the state of a run, what happens next, and what you can do.

    For an experiment, explains the run of its current stage.

    \b
    perilune explain rl
    perilune explain quickstart
    """
    run, explanation = explain_target(open_control(), target)
    if as_json:
        print_json(explanation_document(run, explanation))
        return
    echo(f"{run.stage}: {explanation.state}")
    for line in explanation_lines(explanation):
        echo(wrap_text(line) if not line.startswith("  try") else line)


def explain_target(control: Control, target: str) -> tuple[Run, Explanation]:
    """Return a run, or the run of the current stage of an experiment, and the explanation of its state."""
    from perilune.control.queries.explanation import explain_run
    from perilune.control.queries.lookup import find_current_stage_run, find_run_or_experiment
    from perilune.control.record.store import Run

    named = find_run_or_experiment(control, target)
    with control.store.snapshot() as session:
        run = named if isinstance(named, Run) else find_current_stage_run(session, named.id)
    if run is None:
        raise RequestError(f"no stage of {target} has started", remedy=f"perilune runs {target}")
    return run, explain_run(control, run.id)


def explanation_document(run: Run, explanation: Explanation) -> dict[str, Any]:
    return {"run": run.id, "stage": run.stage} | asdict(explanation)


def explanation_lines(explanation: Explanation) -> list[str]:
    """Return an explanation as labelled lines: because, next, try."""
    rows = [f"  because  {fact}" for fact in explanation.because]
    return [*rows, f"  next     {explanation.next}", *(f"  try      {hint}" for hint in explanation.commands)]


def events(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help=f"{RUN_HELP} Default: all runs.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new events until Ctrl-C.")] = False,
    last: Annotated[
        int | None,
        typer.Option("--last", "-n", min=1, help="Number of the latest events to print. Default: all."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the recorded events of one run or of all runs: requests, actions, changes of state, causes.

    With --json --follow, prints one JSON document on each line.

    \b
    perilune events rl
    perilune events -n 20
    """
    from perilune.control.queries.lookup import events_after, find_run

    control = open_control()
    chosen = None if run is None else find_run(control, run).id
    rows = events_after(control, run_id=chosen)[-(last or 0) :]
    if as_json and not follow:
        print_json({"events": [_event_document(row) for row in rows]})
        return
    last_seq = 0
    while True:
        for row in rows:
            last_seq = row.seq
            if as_json:
                print_json(_event_document(row), indent=None)
            else:
                echo(_format_event(row))
        if not follow:
            return
        time.sleep(POLL_SECONDS)
        control.reconciler.reconcile_all(act=False)
        rows = events_after(control, last_seq, chosen)


def _event_document(row: Event) -> dict[str, Any]:
    names = ("epoch", "kind", "detail", "hash")
    fields = {name: getattr(row, name) for name in names}
    return {"seq": row.seq, "time": row.time, "run": row.run_id, **fields}


def _format_event(row: Event) -> str:
    date = datetime.fromtimestamp(row.time, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    run = "" if row.run_id is None else f"  {row.run_id}" + ("" if row.epoch is None else f"/{row.epoch}")
    detail = "".join(f"  {name}={str(value).partition(chr(10))[0]}" for name, value in row.detail.items())
    return f"{date}{run}  {row.kind}{detail}"


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=RUN_HELP)],
    b: Annotated[str, typer.Argument(metavar="B", help=RUN_HELP)],
    as_json: Json = False,
) -> None:
    """Compare two runs: recipe, code, packages, machine, inputs and results.

    \b
    perilune diff quickstart/rl other/rl
    """
    from perilune.bundle.compare import compare_runs
    from perilune.control.queries.lookup import find_run

    control = open_control()
    comparison = compare_runs(*(control.directory(find_run(control, name)) for name in (a, b)))
    if as_json:
        print_json(asdict(comparison))
        return
    echo(f"{a} -> {b}")
    for part, changes in comparison.parts().items():
        echo(f"{part}:{'' if changes else ' identical'}")
        for change in changes:
            echo(f"  {change}")
