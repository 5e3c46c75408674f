"""Commands about why and when: explain a run, print the record, wait for an end."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.arguments import RUN_HELP, Json, RunOrExperiment, because, brief, open_control
from perilune.cli.output import echo, print_json, wrapped
from perilune.errors import RequestError

if TYPE_CHECKING:
    from perilune.control.record.store import Event
    from perilune.control.runs.next_stage import StageStarter

LOOK_SECONDS = 0.5  # between two looks of `events --follow`
CANCELLED, TIMED_OUT = 3, 124  # exit codes of `wait`; the latter as of timeout(1)


def explain(what: RunOrExperiment, as_json: Json = False) -> None:
    """Say why a run is in its state, what happens next, and what can be done about it.

    Of an experiment, the run of the stage that it is at.

    \b
    perilune explain rl
    perilune explain quickstart
    """
    from perilune.control.queries.explanation import explain as explain_run
    from perilune.control.queries.lookup import find_run_or_experiment, stage_at
    from perilune.control.record.store import Run

    control = open_control()
    named = find_run_or_experiment(control, what)
    with control.store.snapshot() as session:
        found = named if isinstance(named, Run) else stage_at(session, named.id)
    if found is None:
        raise RequestError(f"no stage of {what} has been begun", remedy=f"perilune runs -e {what}")
    told = explain_run(control, found.id)
    if as_json:
        print_json({"run": found.id, "stage": found.stage} | asdict(told))
        return
    echo(f"{found.stage} is {told.state}")
    for fact in told.because:
        echo(wrapped(f"  because  {fact}"))
    echo(wrapped(f"  next     {told.next}"))
    for command in told.commands:
        echo(f"  try      {command}")


def events(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help=RUN_HELP)] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they come, until Ctrl-C.")] = False,
    last: Annotated[int | None, typer.Option("--last", "-n", min=1, help="Only the last so many.")] = None,
    as_json: Json = False,
) -> None:
    """Print what was recorded, of one run or of everything: intents, effects, states and why.

    With --json --follow, one JSON document a line.

    \b
    perilune events rl
    perilune events -n 20
    """
    import json

    from perilune.control.queries.lookup import events_after, find_run

    control = open_control()
    chosen = None if run is None else find_run(control, run).id
    rows = events_after(control, run_id=chosen)[-(last or 0) :]
    if as_json and not follow:
        print_json({"events": [_document(row) for row in rows]})
        return
    seen = 0
    while True:
        for row in rows:
            seen = row.seq
            echo(json.dumps(_document(row)) if as_json else _line(row))
        if not follow:
            return
        time.sleep(LOOK_SECONDS)
        control.reconciler.all(act=False)
        rows = events_after(control, seen, chosen)


def wait(
    what: RunOrExperiment,
    timeout: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Give up waiting after so long.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Wait for a run or an experiment to end, going on with it meanwhile. Prints nothing until then.

    An experiment ends with its last stage, or with the first one that fails or is cancelled.

    Exit codes: 0 it succeeded, 1 it failed, 2 it failed because the request was wrong, 3 it was cancelled,
    124 it had not ended after --timeout.

    \b
    perilune wait rl --timeout 3600
    perilune wait quickstart
    """
    from perilune.control.queries.lookup import find_run_or_experiment
    from perilune.control.record.store import Experiment
    from perilune.control.runs.experiments import POLL_SECONDS
    from perilune.control.runs.next_stage import StageStarter
    from perilune.control.runs.stage_failures import REQUEST_CAUSES

    control = open_control()
    found = find_run_or_experiment(control, what)
    starter, named = StageStarter(control), f"{found.name}/" if isinstance(found, Experiment) else ""
    until = None if timeout is None else time.monotonic() + timeout
    while True:
        if named:
            _start_next_stages(starter, found.id)
        run, outcome = starter.experiment(found.id) if named else starter.run(found.id)
        if outcome is not None or (until is not None and time.monotonic() >= until):
            break
        time.sleep(POLL_SECONDS)
    if as_json:
        print_json(({"experiment": found.id} if named else {}) | brief(run))
    else:
        then = "" if outcome in {None, run.state} else "; then it was cancelled"
        late = "" if outcome is not None else f", not ended after {timeout:g} s"
        echo(f"{named}{run.stage}: {run.state}{because(brief(run))}{then}{late}")
    failed = 2 if run.cause in REQUEST_CAUSES else 1
    codes = {"succeeded": 0, "failed": failed, "cancelled": CANCELLED, None: TIMED_OUT}
    raise typer.Exit(codes[outcome])


def _start_next_stages(starter: StageStarter, experiment_id: str) -> None:
    """Begin the experiment's next stage, if that is what it waits for; say on stderr why that cannot be."""
    from perilune.cli.daemon import tell
    from perilune.errors import PeriluneError

    for experiment, what in starter.start_next_stages(experiment_id):
        if isinstance(what, PeriluneError):
            tell(experiment, what)


def _document(row: Event) -> dict[str, Any]:
    names = ("seq", "time", "run_id", "epoch", "kind", "detail", "hash")
    return {name: getattr(row, name) for name in names}


def _line(row: Event) -> str:
    when = datetime.fromtimestamp(row.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
    whose = "" if row.run_id is None else f"  {row.run_id}" + ("" if row.epoch is None else f"/{row.epoch}")
    said = {name: str(value).partition("\n")[0] for name, value in row.detail.items()}
    detail = "".join(f"  {name}={value}" for name, value in said.items())
    return f"{when}{whose}  {row.kind}{detail}"
