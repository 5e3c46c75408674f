"""Refresh live runs before a command lists them, within the time that a user waits for a list."""

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

PATIENCE = 3.0  # seconds for all runs on other machines together
SHORT = 1.0  # seconds for those that were unreachable the last time


def quick_refresh(reconciler: Reconciler, seconds: float = PATIENCE) -> list[Run]:
    """Observe every live run and finish those that have ended; start nothing.

    Runs on this machine are always refreshed. Other machines and providers get `seconds`, or less if they
    were unreachable the last time. Unfinished work continues in threads that die with the process, which is
    as safe as a kill. If a daemon runs, it keeps remote runs up to date, so they are not refreshed here.

    Returns:
        The runs that did not answer in time; their last known state is shown.
    """
    near, far, hidden = _live(reconciler)
    for run_id in near:
        reconciler.one(run_id, act=False)
    reconciler.sweep()
    if has_daemon(reconciler.home):
        return []
    began, slots = time.monotonic(), Semaphore(WORKERS)
    cleanup = _start(reconciler.clean_up)
    again = [_start(partial(_refresh, reconciler, run_id, slots)) for run_id in hidden]
    looks = {run_id: _start(partial(_refresh, reconciler, run_id, slots)) for run_id in far}
    for future in again:
        _wait(future, began + min(seconds, SHORT))
    for future in (*looks.values(), cleanup):
        _wait(future, began + seconds)
    return [reconciler.run(run_id) for run_id, look in looks.items() if not look.done()]


def _live(reconciler: Reconciler) -> tuple[list[str], list[str], list[str]]:
    """Live runs on this machine, on other machines, and on machines that were unreachable the last time."""
    with reconciler.store.snapshot() as session:
        current = (Attempt.run_id == Run.id) & (Attempt.number == Run.current_epoch)
        query = select(Run.id, Attempt.reachability).outerjoin(Attempt, current)
        rows = session.execute(query.where(Run.state.in_(LIVE)).order_by(Run.id)).all()
    elsewhere = {run_id for run_id, _ in rows if reconciler.placements.capabilities(run_id).elsewhere}
    hidden = {run_id for run_id, seen in rows if seen == Reachability.UNREACHABLE} & elsewhere
    near = [run_id for run_id, _ in rows if run_id not in elsewhere]
    return near, sorted(elsewhere - hidden), sorted(hidden)


def _refresh(reconciler: Reconciler, run_id: str, slots: Semaphore) -> None:
    with slots:
        reconciler.one(run_id, act=False)


def _start(work: Callable[[], None]) -> Future[None]:
    """Run `work` in a daemon thread, which, unlike an executor's, does not keep the process alive."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    Thread(target=run, daemon=True).start()
    return future


def _wait(future: Future[None], deadline: float) -> None:
    """Wait for a future until the deadline, and raise its exception."""
    try:
        future.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        if future.done():
            raise
