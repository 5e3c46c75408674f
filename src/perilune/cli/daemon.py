"""`perilune daemon`: reconcile for as long as the machine is up, so that nobody has to be logged in."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from threading import Thread
from typing import TYPE_CHECKING, Annotated

import typer

from perilune.cli.arguments import because, brief, open_control
from perilune.cli.output import echo
from perilune.errors import PeriluneError, RequestError

if TYPE_CHECKING:
    from perilune.control.record.store import Experiment
    from perilune.control.runs.experiments import Control
    from perilune.control.runs.next_stage import StageStarter
    from perilune.control.runs.progress import StageStarted

LOCK_TRIES = 3
LONGEST_PAUSE = 60.0  # seconds between two passes while they fail


class _Stop(BaseException):
    """The daemon is told to leave. No error, so that nothing on the way takes it for one."""


def daemon(
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two passes.")] = 2.0,
) -> None:
    """Bring recorded state and reality together until SIGTERM: finish, retry, clean up, tend rented machines.

    Where a stage of an experiment has succeeded, the next one is begun, as it was asked for.

    One a home. It holds no state: killed at any moment, the next one goes on. What it sees change it prints,
    for a journal. docs/how-to/daemon.md has a systemd unit.

    \b
    perilune daemon
    """
    from perilune.control.record.home import locked

    control = open_control(look=False)
    control.home.daemon.mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, _leave)
    with ExitStack() as stack:
        for _ in range(LOCK_TRIES):  # a command may just be looking whether there is a daemon
            if stack.enter_context(locked(control.home.daemon)):
                break
            time.sleep(0.1)
        else:
            raise RequestError("a daemon looks after this home already", where=str(control.home.root))
        echo(f"looking after {control.home.root}")
        try:
            _look_after(control, every)
        except _Stop:
            echo("told to leave; runs go on by themselves")


def _look_after(control: Control, every: float) -> None:
    from perilune.control.runs.next_stage import StageStarter

    seen: dict[str, str] = {}
    failures = 0
    beginning: Thread | None = None
    starter = StageStarter(control)
    while True:
        try:
            live = control.reconciler.all()
        except PeriluneError as error:  # the database is away, or its disk full: it may be mended
            failures += 1
            echo(f"pass failed, trying again: {error}", err=True)
        else:
            failures = 0
            for run in live:
                if seen.get(run.id) != run.state:
                    echo(f"{run.id} {run.stage}: {run.state}{because(brief(run))}")
            seen = {run.id: run.state for run in live}
        if beginning is None or not beginning.is_alive():  # beside the passes: a large input takes a while
            beginning = Thread(target=_start_next_stages, args=(starter,), daemon=True)
            beginning.start()
        time.sleep(min(LONGEST_PAUSE, every * 2.0**failures))


def _start_next_stages(starter: StageStarter) -> None:
    try:
        for experiment, what in starter.start_next_stages():
            tell(experiment, what)
    except PeriluneError as error:
        echo(f"no stage could be begun, trying again: {error}", err=True)


def tell(experiment: Experiment, what: StageStarted | PeriluneError) -> None:
    """Say what came of going on with an experiment."""
    if isinstance(what, PeriluneError):
        echo(f"{experiment.name} cannot go on, trying again: {what}", err=True)
    else:
        echo(
            f"{what.run_id} {what.stage}: stage {what.position} of {what.stages} of {experiment.name} begins"
        )


def _leave(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Stop
