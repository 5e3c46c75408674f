"""Record whether an attempt is reachable, and since when it is not. This alone ends nothing."""

from perilune.control.record.clock import boot_seconds
from perilune.control.record.ledger import require_current
from perilune.control.record.store import Attempt, Store, record_event
from perilune.control.record.transitions import Reachability
from perilune.execution.observation import Observation
from perilune.execution.processes import boot_id


def note_reachability(store: Store, attempt: Attempt, seen: Observation) -> None:
    was_hidden = attempt.reachability == Reachability.UNREACHABLE
    if seen.claim is None and not seen.is_hidden and not was_hidden:
        return
    since = attempt.unreachable_since or {}
    moved = seen.heartbeat > since.get("heartbeat", -1)  # its files are shared, and its heartbeat counts on
    new_boot = since.get("boot_id") != boot_id()
    now = Reachability.UNREACHABLE if seen.is_hidden else Reachability.REACHABLE
    if now == attempt.reachability and not (seen.is_hidden and (moved or new_boot)):
        return
    with store.transaction() as session:
        row = require_current(session, attempt)
        count = {"boot_id": boot_id(), "seconds": boot_seconds(), "heartbeat": seen.heartbeat}
        row.unreachable_since = count if seen.is_hidden else None
        if row.reachability != now:
            row.reachability = now.value
            why = {"why": seen.unseen} if seen.unseen else {}
            record_event(session, f"attempt.{now.value}", run_id=row.run_id, epoch=row.number, **why)
    attempt.unreachable_since, attempt.reachability = row.unreachable_since, row.reachability


def unreachable_seconds(attempt: Attempt, seen: Observation) -> float:
    """Return how long the attempt has been unreachable, counted within this boot."""
    since = attempt.unreachable_since
    if since is None or not seen.is_hidden or since["boot_id"] != boot_id():
        return 0.0
    return boot_seconds() - float(since["seconds"])
