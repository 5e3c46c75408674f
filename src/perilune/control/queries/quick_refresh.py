"""A look at what lives, for commands that only tell: not waited for longer than people wait for a list."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Semaphore, Thread

from sqlalchemy import select

from perilune.control.record.home import has_daemon
from perilune.control.record.store import Attempt, Run
from perilune.control.record.transitions import Reachability
from perilune.control.runs.current_submission import LIVE
from perilune.control.runs.reconcile import WORKERS, Reconciler

PATIENCE = 3.0  # seconds for machines elsewhere, together
SHORT = 1.0  # for those that could not be seen the last time


def quick_refresh(reconciler: Reconciler, seconds: float = PATIENCE) -> list[Run]:
    """Look at every live run, finish what has ended, and begin nothing.

    Runs of this machine are looked at in any case. Those elsewhere, and providers, are given `seconds`, or
    less where they could not be seen the last time. What has not answered by then goes on in threads that die
    with the process, which is as safe as a kill. A daemon looks all the time, so nobody else does then.

    Returns:
        The runs that did not answer now, and are told as they were seen last.
    """
    near, far, hidden = _live(reconciler)
    for run_id in near:
        reconciler.one(run_id, act=False)
    reconciler.sweep()
    if has_daemon(reconciler.home):
        return []
    began, room = time.monotonic(), Semaphore(WORKERS)
    upkeep = _begin(reconciler.clean_up)
    again = [_begin(partial(_one, reconciler, run_id, room)) for run_id in hidden]
    looks = {run_id: _begin(partial(_one, reconciler, run_id, room)) for run_id in far}
    for future in again:
        _wait(future, began + min(seconds, SHORT))
    for future in (*looks.values(), upkeep):
        _wait(future, began + seconds)
    return [reconciler.run(run_id) for run_id, look in looks.items() if not look.done()]


def _live(reconciler: Reconciler) -> tuple[list[str], list[str], list[str]]:
    """Runs here, those elsewhere, and those elsewhere that could not be seen the last time."""
    with reconciler.store.snapshot() as session:
        current = (Attempt.run_id == Run.id) & (Attempt.number == Run.current_epoch)
        query = select(Run.id, Attempt.reachability).outerjoin(Attempt, current)
        rows = session.execute(query.where(Run.state.in_(LIVE)).order_by(Run.id)).all()
    elsewhere = {run_id for run_id, _ in rows if reconciler.placements.capabilities(run_id).elsewhere}
    hidden = {run_id for run_id, seen in rows if seen == Reachability.UNREACHABLE} & elsewhere
    every = [run_id for run_id, _ in rows]
    return (
        [run_id for run_id in every if run_id not in elsewhere],
        [run_id for run_id in every if run_id in elsewhere - hidden],
        [run_id for run_id in every if run_id in hidden],
    )


def _one(reconciler: Reconciler, run_id: str, room: Semaphore) -> None:
    with room:
        reconciler.one(run_id, act=False)


def _begin(work: Callable[[], None]) -> Future[None]:
    """Do it in a thread that does not keep the process alive, as those of an executor would."""
    future: Future[None] = Future()

    def carry_out() -> None:
        try:
            work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    Thread(target=carry_out, daemon=True).start()
    return future


def _wait(future: Future[None], deadline: float) -> None:
    """Wait until it is done, or the deadline; what it raised is raised here."""
    try:
        future.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        if future.done():
            raise
