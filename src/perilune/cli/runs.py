"""Commands about runs: list, show, read, stop, try again, bring up to date."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.arguments import (
    Json,
    RunArgument,
    RunOrExperiment,
    because,
    brief,
    open_control,
    show_events,
)
from perilune.cli.output import echo, print_json, wrapped, write
from perilune.cli.run_table import doubts, interval, print_runs
from perilune.errors import PeriluneError, RequestError

if TYPE_CHECKING:
    from perilune.control.record.store import Experiment
    from perilune.control.runs.experiments import Control
    from perilune.control.runs.progress import StageStarted

WATCH_SECONDS = 2.0  # between two looks of `reconcile --watch`


def runs(
    experiment: Annotated[
        str | None, typer.Option("--experiment", "-e", help="Only this one: a name, or the start of an id.")
    ] = None,
    last: Annotated[
        int, typer.Option("--last", "-n", min=1, help="Of the experiments submitted last, so many.")
    ] = 20,
    everything: Annotated[bool, typer.Option("--all", help="Of all experiments.")] = False,
    as_json: Json = False,
) -> None:
    """List runs, by experiment and in the order of stages: of the latest experiments, unless told otherwise.

    \b
    perilune runs
    perilune runs --experiment quickstart --json
    perilune runs --all
    """
    from perilune.control.queries.lookup import (
        experiment_count,
        find_experiment,
        latest_experiments,
        stage_statuses,
    )

    control = open_control()
    chosen = latest_experiments(control, None if everything else last)
    if experiment is not None:
        chosen = [find_experiment(control, experiment).id]
    statuses = stage_statuses(control, chosen)
    more = experiment_count(control) - len(chosen)
    if as_json:
        listed = [status.document() for status in statuses]
        print_json({"home": str(control.home.root), "runs": listed, "other_experiments": more})
    elif statuses:
        _tell_unclean(control)
        print_runs(statuses)
        if more and experiment is None:
            echo(f"{more:,} older experiments: perilune runs --all")
    else:
        echo("no runs yet; try: perilune quickstart")


def show(run: RunArgument, as_json: Json = False) -> None:
    """Show one run: state and why, attempts, figures, where its files are.

    \b
    perilune show evaluate
    perilune show quickstart/rl --json
    """
    from perilune.control.queries.lookup import find_run, run_document

    control = open_control()
    document = run_document(control, find_run(control, run))
    if as_json:
        print_json(document)
        return
    echo(f"run {document['id']}: stage {document['stage']} of {document['experiment']}")
    echo(f"  state      {document['state']}{because(document)}")
    for condition in document["conditions"]:
        echo(f"  error      {condition['about']}: {condition['message']}")
    for attempt in document["attempts"]:
        where = f"{attempt['placement']}/{attempt['launcher']}"
        doubt = doubts(attempt["state"], attempt["reachability"], attempt["cleanup"])
        echo(f"  attempt {attempt['number']}  {attempt['state']} on {where}{doubt}{because(attempt)}")
        if attempt["container"]:
            echo(f"             image {attempt['container']['image_id']}")
    if document["retry_of"]:
        echo(f"  retry of   {document['retry_of']}")
    for warning in document["summary"].get("warnings") or ():
        echo(wrapped(f"  warning    {warning}", indent=13))
    for name, value in _figures(document["summary"]).items():
        echo(f"  {name:<22} {value}")
    echo(f"  bundle     {document['bundle_digest']}\n             {document['bundle']}")
    echo(f"  files      {document['directory']}")


def logs(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    as_json: Json = False,
) -> None:
    """Print a run's log; -f follows it.

    Control characters are shown, not obeyed: \\x1b stands for ESC. Of a very long log the first 8 MiB and at
    least the last 16 MiB are kept; runtime/ in the run's directory holds them as they were printed.

    \b
    perilune logs rl -f
    """
    from perilune.control.queries.lookup import find_run
    from perilune.control.runs.requests import logs as log_text

    control = open_control()
    found = find_run(control, run)
    text = log_text(control, found.id, follow=follow)
    if as_json:
        print_json({"run": found.id, "stage": found.stage, "lines": "".join(text).splitlines()})
        return
    printed = False
    for chunk in text:
        printed = printed or bool(chunk)
        write(chunk)
    if not printed:
        echo(f"it has printed nothing; why: perilune explain {found.id}", err=True)


def cancel(
    what: RunOrExperiment,
    force: Annotated[
        bool, typer.Option("--force", help="Give it up even if it cannot be proven to have stopped.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Stop a run, or an experiment: its task is asked to leave, then made to. What it finished stays.

    No further stage begins until `perilune run` asks for it again. A run that another experiment wants as
    well goes on for that one when an experiment is cancelled.

    A run whose worker cannot be seen (it is on another machine) is cancelled only with --force. No result of
    it is taken then, and `perilune reconcile` stops it as soon as it is seen again.

    \b
    perilune cancel rl
    perilune cancel rl --force
    perilune cancel quickstart
    """
    from perilune.control.queries.lookup import find_run_or_experiment
    from perilune.control.record.store import Run
    from perilune.control.runs.requests import cancel as cancel_run
    from perilune.control.runs.requests import cancel_experiment, left_running

    control = open_control()
    found = find_run_or_experiment(control, what)
    if isinstance(found, Run):
        stopped = [cancel_run(control, found.id, force=force)]
        document = brief(stopped[0])
    else:
        stopped = cancel_experiment(control, found.id, force=force)
        document = {"experiment": found.id, "runs": [brief(run) for run in stopped]}
    if as_json:
        print_json(document)
        return
    for run in stopped:
        if run.state == "succeeded":
            echo(f"{run.stage}: had succeeded before it could be stopped; no stage follows it")
        else:
            echo(f"{run.stage}: {run.state}; `perilune retry {run.id}` takes it up again")
    if not isinstance(found, Run):
        for run in left_running(control, found.id):
            echo(f"{run.stage}: goes on, because another experiment wants run {run.id} too")
        echo(f"{found.name}: no further stage begins; `perilune run` takes it up again")
    _tell_unclean(control)


def retry(
    run: RunArgument,
    detach: Annotated[bool, typer.Option("--detach", help="Start it and do not wait.")] = False,
    as_json: Json = False,
) -> None:
    """Try a failed or cancelled run again, from its last complete checkpoint.

    The same bundle is submitted as a new run that is linked to the old one. Stages after it begin when
    `perilune run` asks for the experiment again.

    \b
    perilune retry rl
    """
    from perilune.control.queries.lookup import find_run
    from perilune.control.runs.experiments import watch
    from perilune.control.runs.requests import retry as retry_run

    control = open_control()
    new = retry_run(control, find_run(control, run).id)
    if detach:
        new = control.reconciler.one(new.id)
    else:
        show_events(watch(control, new.id))
        new = control.run(new.id)
    if as_json:
        print_json(brief(new))
    else:
        echo(f"{new.stage}: {new.state}{because(brief(new))}; run {new.id}")
    if new.state in {"failed", "cancelled"}:
        raise typer.Exit(1)


def reconcile(
    watch: Annotated[bool, typer.Option("--watch", help="Go on, until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Bring recorded state and reality together: notice what ended, go on with what can go on.

    Where a stage of an experiment has succeeded, the next one is begun, as it was asked for.

    Also checks the events recorded since the last check for changes; `perilune verify` checks all of them.

    \b
    perilune reconcile
    perilune reconcile --watch
    """
    from perilune.cli.daemon import tell
    from perilune.control.runs.next_stage import StageStarter

    control = open_control(look=False)
    _check_record(control)
    seen: dict[str, str] = {}
    starter = StageStarter(control)
    while True:
        begun: list[tuple[Experiment, StageStarted | PeriluneError]] = []
        try:
            live = control.reconciler.all()
            begun = list(starter.start_next_stages())
            if begun:
                live += control.reconciler.all()
        except PeriluneError as error:  # of the database: it may be mended
            if not watch:
                raise
            live = []
            echo(f"pass failed, trying again: {error}", err=True)
        for experiment, what in [] if as_json else begun:
            tell(experiment, what)
        if as_json:
            print_json({"runs": [brief(run) for run in live]})
        for run in live:
            if not as_json and seen.get(run.id) != run.state:
                echo(f"{run.id} {run.stage}: {run.state}{because(brief(run))}")
            seen[run.id] = run.state
        if not watch:
            break
        time.sleep(WATCH_SECONDS)
    if not seen and not as_json:
        echo("nothing is under way")
    _tell_unclean(control)


def _check_record(control: Control) -> None:
    from perilune.control.evidence.verification import record_problem

    if problem := record_problem(control, since_last=True):
        raise RequestError(
            f"the record was changed after it was written: {problem}",
            where=control.store.database.where,
            remedy="restore the database from a backup",
        )


def _figures(summary: Mapping[str, Any]) -> dict[str, str]:
    """The figures of a summary that fit a line: numbers, and measures with their interval."""
    found = {}
    for name, value in summary.items():
        if isinstance(value, float):
            found[name] = f"{value:,.4g}"
        elif isinstance(value, int | str):
            found[name] = f"{value:,}" if type(value) is int else str(value)
        elif isinstance(value, Mapping) and value.keys() == {"mean", "low", "high"}:
            found[name] = interval(value)
    return found


def _tell_unclean(control: Control) -> None:
    """Say first, and on stderr, what is not proven to have stopped, or to cost nothing any more."""
    from perilune.cli.machines import tell_unproven
    from perilune.control.record.transitions import AttemptState

    tell_unproven(control)
    for attempt in control.reconciler.unclean():
        stopped = attempt.state != AttemptState.LOST
        doubt = (
            f"has not been removed from {attempt.placement}" if stopped else "is not proven to have stopped"
        )
        echo(
            f"warning: attempt {attempt.number} of run {attempt.run_id} {doubt}; every command tries again",
            err=True,
        )
    for condition in control.reconciler.conditions.all():
        run = f"run {condition.run_id}: " if condition.run_id else ""
        echo(f"warning: {run}{condition}", err=True)
