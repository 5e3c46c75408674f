"""Commands about runs: list, show, read, stop, try again, compare, reproduce, hand over."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.output import as_markup, echo, print_json, write
from perilune.errors import RequestError

if TYPE_CHECKING:
    from perilune.control.experiments import Control
    from perilune.control.lookup import StageStatus
    from perilune.control.progress import StageEvent
    from perilune.control.store import Run

WATCH_SECONDS = 2.0  # between two looks of `reconcile --watch`
RUN_HELP = "Id of the run, a unique beginning of it, EXPERIMENT/STAGE, or a stage of the latest experiment."

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def runs(
    experiment: Annotated[
        str | None, typer.Option("--experiment", "-e", help="Only this one: a name, or the start of an id.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List runs, by experiment and in the order of stages.

    \b
    perilune runs
    perilune runs --experiment quickstart --json
    """
    from perilune.control.lookup import find_experiment, stage_statuses

    control = _control()
    chosen = None if experiment is None else find_experiment(control, experiment).id
    statuses = stage_statuses(control, chosen)
    if as_json:
        print_json({"home": str(control.home.root), "runs": [status.document() for status in statuses]})
    elif statuses:
        _tell_unclean(control)
        _print_table(statuses)
    else:
        echo("no runs yet; try: perilune quickstart")


def show(run: RunArgument, as_json: Json = False) -> None:
    """Show one run: state and why, attempts, figures, where its files are.

    \b
    perilune show evaluate
    perilune show quickstart/rl --json
    """
    from perilune.control.lookup import find_run, run_document

    control = _control()
    document = run_document(control, find_run(control, run))
    if as_json:
        print_json(document)
        return
    echo(f"run {document['id']}: stage {document['stage']} of {document['experiment']}")
    echo(f"  state      {document['state']}{_because(document)}")
    for attempt in document["attempts"]:
        where = f"{attempt['placement']}/{attempt['launcher']}"
        doubts = _doubts(attempt["reachability"], attempt["cleanup"])
        echo(f"  attempt {attempt['number']}  {attempt['state']} on {where}{doubts}{_because(attempt)}")
    if document["retry_of"]:
        echo(f"  retry of   {document['retry_of']}")
    for key, value in document["summary"].items():
        if isinstance(value, str | int | float):
            echo(f"  {key:<10} {value}")
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
    from perilune.control.lookup import find_run
    from perilune.control.requests import logs as log_text

    control = _control()
    found = find_run(control, run)
    text = log_text(control, found.id, follow=follow)
    if as_json:
        print_json({"run": found.id, "stage": found.stage, "lines": "".join(text).splitlines()})
        return
    for chunk in text:
        write(chunk)


def cancel(
    run: RunArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Give it up even if it cannot be proven to have stopped.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Stop a run: its task is asked to leave, then made to. What it finished stays.

    A run whose worker cannot be seen (it is on another machine) is cancelled only with --force. No result of
    it is taken then, and `perilune reconcile` stops it as soon as it is seen again.

    \b
    perilune cancel rl
    perilune cancel rl --force
    """
    from perilune.control.lookup import find_run
    from perilune.control.requests import cancel as cancel_run

    control = _control()
    ended = cancel_run(control, find_run(control, run).id, force=force)
    if as_json:
        print_json(_brief(ended))
    elif ended.state == "succeeded":
        echo(f"{ended.stage}: had succeeded before it could be stopped")
    else:
        echo(f"{ended.stage}: {ended.state}; `perilune retry {ended.id}` takes it up again")
    _tell_unclean(control)


def retry(
    run: RunArgument,
    detach: Annotated[bool, typer.Option("--detach", help="Start it and do not wait.")] = False,
    as_json: Json = False,
) -> None:
    """Try a failed or cancelled run again, from its last complete checkpoint.

    The same bundle is submitted as a new run that is linked to the old one.

    \b
    perilune retry rl
    """
    from perilune.control.experiments import watch
    from perilune.control.lookup import find_run
    from perilune.control.requests import retry as retry_run

    control = _control()
    new = retry_run(control, find_run(control, run).id)
    if detach:
        new = control.reconciler.one(new.id)
    else:
        _show(watch(control, new.id))
        new = control.run(new.id)
    if as_json:
        print_json(_brief(new))
    else:
        echo(f"{new.stage}: {new.state}{_because(_brief(new))}; run {new.id}")
    if new.state in {"failed", "cancelled"}:
        raise typer.Exit(1)


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=RUN_HELP)],
    b: Annotated[str, typer.Argument(metavar="B", help=RUN_HELP)],
    as_json: Json = False,
) -> None:
    """Say what differs between two runs: recipe, code, packages, machine, inputs, results.

    \b
    perilune diff quickstart/rl other/rl
    """
    from perilune.bundle.compare import compare_runs
    from perilune.control.lookup import find_run

    control = _control()
    found = compare_runs(*(control.directory(find_run(control, name)) for name in (a, b)))
    if as_json:
        print_json(found.document())
        return
    for part, changes in found.parts().items():
        echo(f"{part}: {'the same' if not changes else ''}")
        for change in changes:
            echo(f"  {change}")


def reproduce(run: RunArgument, as_json: Json = False) -> None:
    """Run a frozen bundle again and compare metrics, episodes and final checkpoint byte for byte.

    Leaves with 0 only when they are identical.

    \b
    perilune reproduce rl
    """
    from perilune.control.lookup import find_run
    from perilune.control.reproduction import Reproduced
    from perilune.control.reproduction import reproduce as run_again

    control = _control()
    found = find_run(control, run)
    last = _show(run_again(control, found.id))
    assert isinstance(last, Reproduced)
    identical = not last.differences
    if as_json:
        differences = [str(difference) for difference in last.differences]
        print_json(
            {"run": found.id, "stage": found.stage, "identical": identical, "differences": differences}
            | ({"directory": str(last.directory)} if last.directory else {})
        )
    elif identical:
        echo(f"{found.stage}: reproduced; everything it computed is identical")
    else:
        echo(f"{found.stage}: not reproduced; the second run is in {last.directory}")
        for difference in last.differences:
            echo(f"  {difference}")
    if not identical:
        raise typer.Exit(1)


def collect(
    run: RunArgument,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also copy it to this new folder.")] = None,
    as_json: Json = False,
) -> None:
    """Bring a run's evidence home and check that it is whole.

    \b
    perilune collect rl --out rl-evidence
    """
    from perilune.control.lookup import find_run
    from perilune.control.requests import collect as collect_run

    control = _control()
    found = find_run(control, run)
    files = collect_run(control, found.id, out)
    place = out or control.directory(found)
    if as_json:
        listed = [str(file) for file in files]
        print_json({"run": found.id, "stage": found.stage, "directory": str(place), "files": listed})
    else:
        echo(f"{found.stage}: {len(files)} files, whole, in {place}")


def reconcile(
    watch: Annotated[bool, typer.Option("--watch", help="Go on, until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Bring recorded state and reality together: notice what ended, go on with what can go on.

    Also checks that no event of the record was changed.

    \b
    perilune reconcile
    perilune reconcile --watch
    """
    control = _control(look=False)
    _check_record(control)
    seen: dict[str, str] = {}
    while True:
        live = control.reconciler.all()
        if as_json:
            print_json({"runs": [_brief(run) for run in live]})
        for run in live:
            if not as_json and seen.get(run.id) != run.state:
                echo(f"{run.id} {run.stage}: {run.state}{_because(_brief(run))}")
            seen[run.id] = run.state
        if not watch:
            break
        time.sleep(WATCH_SECONDS)
    if not seen and not as_json:
        echo("nothing is under way")
    _tell_unclean(control)


def worker(
    bundle: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="Folder of a frozen bundle, or a copy of one.")
    ],
    epoch: Annotated[
        int | None, typer.Option(min=1, help="Number of the attempt (default: one more than was seen).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Execute a bundle here, in place. This is what a remote machine runs.

    \b
    perilune worker ./bundle
    """
    from perilune.execution.worker import run_bundle

    verdict = run_bundle(bundle, epoch, echo=not as_json)
    if as_json:
        print_json(verdict.document())
    elif verdict.succeeded:
        echo(f"succeeded in {verdict.seconds:.1f} s; artifacts in {bundle / 'artifacts'}")
    else:
        echo(f"{verdict.cause}: {verdict.message}", err=True)
    if not verdict.succeeded:
        raise typer.Exit(2 if verdict.cause in {"request_error", "bundle_rejected"} else 1)


def _control(*, look: bool = True) -> Control:
    """The control plane of this home, after a look at what has happened meanwhile."""
    from perilune.control.experiments import Control

    control = Control()
    if look:
        control.reconciler.all(act=False)
    return control


def _check_record(control: Control) -> None:
    from perilune.control.store import verify_events

    with control.store.snapshot() as session:
        broken = verify_events(session)
    if broken is not None:
        raise RequestError(
            f"event {broken} was changed after it was recorded",
            where=str(control.home.database),
            remedy="restore the database from a backup",
        )


def _show(events: Iterable[StageEvent]) -> StageEvent | None:
    """Show progress on stderr as events come; returns the last one."""
    from perilune.cli.console import stage_progress
    from perilune.cli.follow import show as show_event

    last: StageEvent | None = None
    with stage_progress() as view:
        for event in events:
            last = event
            show_event(event, view)
    return last


def _brief(run: Run) -> dict[str, Any]:
    names = ("id", "stage", "state", "cause", "message", "retry_of")
    return {name: getattr(run, name) for name in names} | {"attempts": run.current_epoch}


def _tell_unclean(control: Control) -> None:
    """Say first, and on stderr, what is not proven to have stopped."""
    for attempt in control.reconciler.unclean():
        echo(
            f"warning: attempt {attempt.number} of run {attempt.run_id} is not proven to have stopped;"
            " every command goes on trying",
            err=True,
        )


def _doubts(reachability: str, cleanup: str) -> str:
    unstopped = ", not proven to have stopped" if cleanup == "pending" else ""
    return unstopped or (", unreachable" if reachability == "unreachable" else "")


def _because(fields: dict[str, Any]) -> str:
    return f" ({fields['cause']}: {fields['message']})" if fields["cause"] else ""


def _print_table(statuses: Sequence[StageStatus]) -> None:
    from rich.console import Console
    from rich.table import Table

    from perilune.cli.console import duration

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ("experiment", "stage", "task", "state", "attempts", "time", "result", "run"):
        table.add_column(name, no_wrap=name != "result")
    for status in statuses:
        state = status.state + _doubts(status.reachability, status.cleanup)
        time_taken = duration(status.seconds) if status.seconds is not None else ""
        attempts = str(status.attempts or "")
        row = (status.experiment, status.name, status.task, state, attempts, time_taken, _result(status))
        table.add_row(*map(as_markup, row), status.run_id)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    console.print(table)


def _result(status: StageStatus) -> str:
    score = status.summary.get("pass@1")
    if score:
        return f"pass@1 {score['mean']:.1%} ({score['low']:.1%} to {score['high']:.1%})"
    for figure in ("rows", "steps"):
        if figure in status.summary:
            return f"{status.summary[figure]} {figure}"
    return status.cause
