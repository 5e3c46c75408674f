"""`perilune daemon` and `perilune reconcile`: update recorded state and continue what can continue."""

from __future__ import annotations

import signal
import time
from threading import Thread
from typing import TYPE_CHECKING, Annotated

import typer

from perilune.cli.arguments import Json, format_reason, open_control, summarize_run
from perilune.cli.machines.rented import warn_about_cleanup
from perilune.cli.output import echo, print_json
from perilune.errors import PeriluneError, RequestError
from perilune.files import locked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perilune.control.record.store import Experiment, Run
    from perilune.control.runs.experiments import Control
    from perilune.control.runs.next_stage import StageStarter
    from perilune.control.runs.progress import StageStarted

WATCH_SECONDS = 2.0  # seconds between two passes of `reconcile --watch`
LOCK_WAIT_S = 0.3
LONGEST_PAUSE = 60.0  # seconds between two passes while they fail


class _Stop(BaseException):
    """SIGTERM arrived. Derives from BaseException so that no error handler catches it."""


def daemon(every: Annotated[float, typer.Option(min=0.2, help="Seconds between two passes.")] = 2.0) -> None:
    """Keep all runs of this home going until SIGTERM.

    The daemon records results, retries failed attempts, starts the next stage of experiments, and releases
    rented machines. It prints each change of state.

    A home has at most one daemon. The daemon keeps no state of its own: if it is killed, start it again.
    docs/how-to/daemon.md has a systemd unit.

    \b
    perilune daemon
    """
    control = open_control(refresh=False)
    control.home.daemon.mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, _stop)
    # A command may hold the lock for a moment to check for a daemon.
    with locked(control.home.daemon / "lock", wait=LOCK_WAIT_S) as acquired:
        if not acquired:
            raise RequestError("a daemon for this home is already running", where=str(control.home.root))
        echo(f"watching {control.home.root}")
        try:
            _watch(control, every)
        except _Stop:
            echo("stopped by SIGTERM; runs continue without the daemon")


def _stop(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Stop


def _watch(control: Control, every: float) -> None:
    from perilune.control.runs.next_stage import StageStarter
    from perilune.control.runs.reconcile import PASS_TIMEOUT_S

    states: dict[str, str] = {}
    failures = 0
    thread: Thread | None = None
    starter = StageStarter(control)
    while True:
        try:
            live = control.reconciler.reconcile_all(patience=PASS_TIMEOUT_S)
        except PeriluneError as error:  # the database may be unreachable or its disk full, for a while
            failures += 1
            echo(f"pass failed, trying again: {error}", err=True)
        else:
            failures = 0
            _print_changes(live, states)
            states = {run.id: run.state for run in live}
        if thread is None or not thread.is_alive():  # in a thread, because freezing a large input is slow
            thread = Thread(target=_start_next_stages, args=(starter,), daemon=True)
            thread.start()
        time.sleep(min(LONGEST_PAUSE, every * 2.0**failures))


def _start_next_stages(starter: StageStarter) -> None:
    try:
        for experiment, started in starter.start_next_stages():
            print_progress(experiment, started)
    except PeriluneError as error:
        echo(f"no stage could start, trying again: {error}", err=True)


def reconcile(
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Update the recorded state of live runs, and start the next stages of experiments.

    Records the results of ended attempts, and starts the next stage of each experiment whose stage succeeded.
    Also checks that the events recorded since the last check are unchanged; `perilune verify` checks all.
    With `--watch --json`, prints one line of JSON for each check.

    \b
    perilune reconcile
    perilune reconcile --watch
    """
    from perilune.control.runs.next_stage import StageStarter
    from perilune.control.runs.reconcile import PASS_TIMEOUT_S

    control = open_control(refresh=False)
    _check_record(control)
    patience = PASS_TIMEOUT_S if watch else None
    states: dict[str, str] = {}
    starter = StageStarter(control)
    while True:
        started: list[tuple[Experiment, StageStarted | PeriluneError]] = []
        try:
            live = control.reconciler.reconcile_all(patience=patience)
            started = list(starter.start_next_stages())
            if started:
                live += control.reconciler.reconcile_all(patience=patience)
        except PeriluneError as error:  # the database failed, and may recover
            if not watch:
                raise
            live = []
            echo(f"pass failed, trying again: {error}", err=True)
        if as_json:
            print_json({"runs": [summarize_run(run) for run in live]}, indent=None if watch else 2)
        else:
            for experiment, outcome in started:
                print_progress(experiment, outcome)
            _print_changes(live, states)
        if not watch:
            break
        time.sleep(WATCH_SECONDS)
    if not states and not as_json:
        echo("no live runs")
    warn_about_cleanup(control)


def _check_record(control: Control) -> None:
    from perilune.control.evidence.verification import find_record_problem

    if problem := find_record_problem(control, since_last=True):
        raise RequestError(
            f"recorded events were changed afterwards: {problem}",
            where=control.store.database.where,
            remedy="restore the database from a backup",
        )


def _print_changes(live: Iterable[Run], seen: dict[str, str]) -> None:
    """Print each run whose state differs from the one in `seen`, and update `seen`."""
    for run in live:
        if seen.get(run.id) != run.state:
            echo(f"{run.id} {run.stage}: {run.state}{format_reason(summarize_run(run))}")
        seen[run.id] = run.state


def print_progress(experiment: Experiment, outcome: StageStarted | PeriluneError) -> None:
    """Print the stage of an experiment that started, or on stderr the problem that prevents it."""
    if isinstance(outcome, PeriluneError):
        echo(f"{experiment.name} cannot continue, trying again: {outcome}", err=True)
    else:
        position = f"stage {outcome.position} of {outcome.stages} of {experiment.name}"
        echo(f"{outcome.run_id} {outcome.stage}: {position} starts")
