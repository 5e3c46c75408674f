"""Refresh live runs before a command lists them, within the time that a user waits for a list."""

import time
from functools import partial
from threading import Semaphore

from sqlalchemy import select

from perilune.control.record.home import has_daemon
from perilune.control.record.store import Attempt, Run
from perilune.control.record.transitions import Reachability
from perilune.control.runs.current_submission import LIVE_STATES
from perilune.control.runs.reconcile import MAX_REMOTE_LOOKS, Reconciler
from perilune.execution.background import in_background, wait_until

REFRESH_TIMEOUT_S = 3.0  # seconds for all runs on other machines together
UNREACHABLE_TIMEOUT_S = 1.0  # seconds for those that were unreachable the last time


def quick_refresh(reconciler: Reconciler) -> list[Run]:
    """Observe every live run and finish those that have ended; start nothing.

    Runs on this machine are always refreshed. Other machines and providers get a few seconds, or less if they
    were unreachable the last time. Unfinished work continues in threads that end with the process. That is
    safe, because a process may be killed at any time. If a daemon runs, it keeps remote runs up to date, so
    they are not refreshed here.

    Returns:
        The runs that did not answer in time; their last known state is shown.
    """
    near, far, hidden = _find_live_runs(reconciler)
    for run_id in near:
        reconciler.reconcile(run_id, act=False)
    reconciler.sweep()
    if has_daemon(reconciler.home):
        return []
    began, slots = time.monotonic(), Semaphore(MAX_REMOTE_LOOKS)
    cleanup = in_background(reconciler.clean_up)
    looks = {
        run_id: in_background(partial(reconciler.reconcile, run_id, act=False), slots)
        for run_id in hidden + far
    }
    wait_until(began + UNREACHABLE_TIMEOUT_S, *(looks.pop(run_id) for run_id in hidden))
    wait_until(began + REFRESH_TIMEOUT_S, *looks.values(), cleanup)
    return [reconciler.run(run_id) for run_id, look in looks.items() if not look.done()]


def _find_live_runs(reconciler: Reconciler) -> tuple[list[str], list[str], list[str]]:
    """Return the live runs on this machine, on reachable machines, and on those unreachable the last time."""
    with reconciler.store.snapshot() as session:
        current = (Attempt.run_id == Run.id) & (Attempt.number == Run.current_epoch)
        query = select(Run.id, Attempt.reachability).outerjoin(Attempt, current)
        rows = session.execute(query.where(Run.state.in_(LIVE_STATES)).order_by(Run.id)).all()
    elsewhere = {run_id for run_id, _ in rows if reconciler.placements.capabilities(run_id).is_remote}
    hidden = {run_id for run_id, state in rows if state == Reachability.UNREACHABLE} & elsewhere
    near = [run_id for run_id, _ in rows if run_id not in elsewhere]
    return near, sorted(elsewhere - hidden), sorted(hidden)
