"""Record whether an attempt is reachable, and since when it is not. This alone ends nothing."""

from perilune.control.record.clock import boot_seconds
from perilune.control.record.ledger import require_current
from perilune.control.record.store import Attempt, Store, record_event
from perilune.control.record.transitions import Reachability
from perilune.execution.observation import Observation
from perilune.execution.processes import boot_id


def note_reachability(store: Store, attempt: Attempt, observation: Observation) -> None:
    """Record a change of reachability in the database and in `attempt`."""
    was_hidden = attempt.reachability == Reachability.UNREACHABLE
    if observation.claim is None and not observation.is_hidden and not was_hidden:
        return
    since = attempt.unreachable_since or {}
    # On a shared file system, the heartbeat of a worker on another machine shows that the worker lives.
    moved = observation.heartbeat > since.get("heartbeat", -1)
    new_boot = since.get("boot_id") != boot_id()
    now = Reachability.UNREACHABLE if observation.is_hidden else Reachability.REACHABLE
    if now == attempt.reachability and not (observation.is_hidden and (moved or new_boot)):
        return
    with store.transaction() as session:
        row = require_current(session, attempt)
        count = {"boot_id": boot_id(), "seconds": boot_seconds(), "heartbeat": observation.heartbeat}
        row.unreachable_since = count if observation.is_hidden else None
        if row.reachability != now:
            row.reachability = now.value
            why = {"why": observation.unseen} if observation.unseen else {}
            record_event(session, f"attempt.{now.value}", run_id=row.run_id, epoch=row.number, **why)
    attempt.unreachable_since, attempt.reachability = row.unreachable_since, row.reachability


def unreachable_seconds(attempt: Attempt, observation: Observation) -> float:
    """Return how long the attempt has been unreachable, counted within this boot."""
    since = attempt.unreachable_since
    if since is None or not observation.is_hidden or since["boot_id"] != boot_id():
        return 0.0
    return boot_seconds() - float(since["seconds"])
