"""Commands that wait for runs, stop them and run them again."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.arguments import (
    Json,
    RunArgument,
    RunOrExperiment,
    format_reason,
    open_control,
    open_run,
    summarize_run,
)
from perilune.cli.machines.daemon import print_progress
from perilune.cli.machines.rented import warn_about_cleanup
from perilune.cli.output import echo, print_json
from perilune.errors import PeriluneError

if TYPE_CHECKING:
    from perilune.control.record.store import Experiment, Run
    from perilune.control.runs.experiments import Control
    from perilune.control.runs.next_stage import StageStarter

CANCELLED, TIMED_OUT = 3, 124  # exit codes of `wait`; the latter is that of timeout(1)
LOOK_SECONDS = 5.0  # least time of `wait`: enough to see a run that has ended


def wait(
    target: RunOrExperiment,
    timeout: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Stop waiting after this time.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Wait until a run or an experiment ends. Prints nothing until then.

    An experiment ends with its last stage, or with the first stage that fails or is cancelled. The command
    starts later stages of the experiment while it waits.

    Exit codes: 0 succeeded, 1 failed, 2 failed because the request was wrong, 3 cancelled, 124 not ended
    within --timeout.

    \b
    perilune wait rl --timeout 3600
    perilune wait quickstart
    """
    from perilune.control.queries.lookup import find_current_stage_run, find_run_or_experiment
    from perilune.control.record.store import Experiment
    from perilune.control.runs.experiments import POLL_INTERVAL_S
    from perilune.control.runs.next_stage import StageStarter
    from perilune.control.runs.progress import REQUEST_CAUSES

    control = open_control()
    found = find_run_or_experiment(control, target)
    starter, prefix = StageStarter(control), f"{found.name}/" if isinstance(found, Experiment) else ""
    until = None if timeout is None else time.monotonic() + timeout
    try:
        with _interrupt_after(timeout):
            while True:
                if prefix:
                    _start_next_stage(starter, found.id)
                advance = starter.advance_experiment if prefix else starter.advance_run
                run, outcome = advance(found.id)
                if outcome is not None or (until is not None and time.monotonic() >= until):
                    break
                time.sleep(POLL_INTERVAL_S)
    except _TimeIsUpError:
        with control.store.snapshot() as session:
            current = find_current_stage_run(session, found.id) if prefix else control.run(found.id)
        if current is None:  # it was still preparing the first stage
            raise typer.Exit(TIMED_OUT) from None
        run, outcome = current, None
    if as_json:
        print_json(({"experiment_id": found.id} if prefix else {}) | summarize_run(run))
    else:
        then = "" if outcome in {None, run.state} else "; then it was cancelled"
        late = "" if outcome is not None else f", not ended after {timeout:g} s"
        echo(f"{prefix}{run.stage}: {run.state}{format_reason(summarize_run(run))}{then}{late}")
    failed = 2 if run.cause in REQUEST_CAUSES else 1
    codes = {"succeeded": 0, "failed": failed, "cancelled": CANCELLED, None: TIMED_OUT}
    raise typer.Exit(codes[outcome])


class _TimeIsUpError(KeyboardInterrupt):
    """The time of `wait` is up. As after Ctrl-C, an upload ends at once."""


@contextmanager
def _interrupt_after(timeout: float | None) -> Iterator[None]:
    """Raise `_TimeIsUpError` in the block after `timeout`, but leave it the time to look once."""

    def interrupt(number: int, frame: object) -> None:
        raise _TimeIsUpError

    if timeout is None:
        yield
        return
    handler = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, min(max(timeout, LOOK_SECONDS), threading.TIMEOUT_MAX))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _start_next_stage(starter: StageStarter, experiment_id: str) -> None:
    """Start the next stage of the experiment if it is due; warn on stderr if it cannot start."""
    for experiment, started in starter.start_next_stages([experiment_id]):
        if isinstance(started, PeriluneError):
            print_progress(experiment, started)


def cancel(
    target: RunOrExperiment,
    force: Annotated[
        bool, typer.Option("--force", help="Cancel even without proof that the run has stopped.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Stop a run or an experiment. Finished stages keep their results.

    The run's process is asked to exit, and killed if it does not. No later stage starts until `perilune run`
    requests it again. If you cancel an experiment, a run that another experiment also needs continues.

    A run on an unreachable machine is cancelled only with --force. Perilune then rejects its results, and
    `perilune reconcile` stops it as soon as the machine answers.

    \b
    perilune cancel rl
    perilune cancel rl --force
    perilune cancel quickstart
    """
    from perilune.control.queries.lookup import find_run_or_experiment
    from perilune.control.record.store import Run
    from perilune.control.runs.current_submission import live_runs

    control = open_control()
    found = find_run_or_experiment(control, target)
    stopped = stop_target(control, found, force=force)
    if as_json:
        print_json(stopped_document(found, stopped))
        return
    for run in stopped:
        if run.state == "succeeded":
            echo(f"{run.stage}: succeeded before it could be stopped; no later stage starts")
        else:
            echo(f"{run.stage}: {run.state}; to resume it: perilune retry {run.id}")
    if not isinstance(found, Run):
        with control.store.snapshot() as session:
            shared = live_runs(session, found.id)
        for run in shared:
            echo(f"{run.stage}: run {run.id} continues, because another experiment needs it")
        echo(f"{found.name}: no later stage starts; `perilune run` resumes the experiment")
    warn_about_cleanup(control)


def stop_target(control: Control, target: Run | Experiment, *, force: bool = False) -> list[Run]:
    """Cancel a run or an experiment; returns the stopped runs in their final states."""
    from perilune.control.record.store import Run
    from perilune.control.runs.requests import cancel_experiment, cancel_run

    if isinstance(target, Run):
        return [cancel_run(control, target.id, force=force)]
    return cancel_experiment(control, target.id, force=force)


def stopped_document(target: Run | Experiment, stopped: Sequence[Run]) -> dict[str, Any]:
    from perilune.control.record.store import Run

    summaries = [summarize_run(run) for run in stopped]
    return summaries[0] if isinstance(target, Run) else {"experiment_id": target.id, "runs": summaries}


def retry(
    run: RunArgument,
    detach: Annotated[bool, typer.Option("--detach", help="Start the run and return.")] = False,
    as_json: Json = False,
) -> None:
    """Retry a failed or cancelled run from its last complete checkpoint.

    Submits the same bundle as a new run that is linked to the old one. Later stages start when
    `perilune run` requests the experiment again.

    \b
    perilune retry rl
    """
    from perilune.cli.train.follow import show_events
    from perilune.control.runs.experiments import follow_run
    from perilune.control.runs.progress import StageFailed, explain_failure
    from perilune.control.runs.requests import retry_run

    control, record = open_run(run)
    new, last = retry_run(control, record.id), None
    if detach:
        new = control.reconciler.reconcile(new.id)
    if not detach or new.state == "failed":
        last = show_events(follow_run(control, new.id))
        new = control.run(new.id)
    if as_json:
        print_json(summarize_run(new))
    else:
        echo(f"{new.stage}: {new.state}{format_reason(summarize_run(new))}; run {new.id}")
    if isinstance(last, StageFailed):
        raise explain_failure(last)


def reproduce(run: RunArgument, as_json: Json = False) -> None:
    """Run a frozen bundle again and compare metrics, episodes and the final checkpoint byte for byte.

    Exits with 0 only if they are identical. If it is interrupted, the same command begins from the start.

    \b
    perilune reproduce rl
    """
    from perilune.cli.train.follow import show_events
    from perilune.control.runs.reproduction import Reproduced
    from perilune.control.runs.reproduction import reproduce_run as run_again

    control, record = open_run(run)
    last = show_events(run_again(control, record.id))
    assert isinstance(last, Reproduced)
    identical = not last.differences
    if as_json:
        differences = [str(difference) for difference in last.differences]
        print_json(
            {"run": record.id, "stage": record.stage, "identical": identical, "differences": differences}
            | {"packages": [str(change) for change in last.packages]}
            | ({"directory": str(last.directory)} if last.directory else {})
        )
    elif identical:
        echo(f"{record.stage}: reproduced; all computed files are identical")
    else:
        echo(f"{record.stage}: not reproduced; the second run is in {last.directory}")
        for difference in last.differences:
            echo(f"  {difference}")
    if not as_json and last.packages:
        echo("the second run loaded other packages:")
        for change in last.packages:
            echo(f"  {change}")
    if not identical:
        raise typer.Exit(1)
