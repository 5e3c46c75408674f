"""Turn a failed stage into the error that ends a command."""

from perilune.control.runs.progress import StageFailed
from perilune.errors import PeriluneError, RequestError, WorkFailedError
from perilune.execution.verdict import Cause

# Causes with exit code 2.
REQUEST_CAUSES = frozenset({Cause.REQUEST, Cause.DISK_FULL, Cause.BUNDLE_REJECTED, Cause.HOST_REFUSED})

REMEDY_PREFIX = "  try: "  # begins the last line of an error that has a remedy


def explain_failure(event: StageFailed) -> PeriluneError:
    """Return the error for a failed stage: RequestError if the request was wrong, else WorkFailedError."""
    kind = RequestError if event.cause in REQUEST_CAUSES else WorkFailedError
    where = f"stage {event.stage}, run {event.run_id}"
    if event.cancelled:
        return kind(
            "cancelled", where=where, remedy="run the same command to continue from its last checkpoint"
        )
    what, _, own_remedy = (event.message or event.cause).partition(f"\n{REMEDY_PREFIX}")
    tail = f"\n  end of its log:\n{_indent(event.log_tail)}" if event.cause == Cause.CRASHED else ""
    remedy = f"perilune logs {event.run_id}; or run the same command to retry from the last checkpoint"
    if event.cause == Cause.DISK_FULL:
        remedy = "free some space (`perilune gc` lists files to delete), then run the same command again"
    elif kind is RequestError:
        remedy = "fix that, then run the same command again"
    return kind(what + tail, where=where, remedy=own_remedy or remedy)


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
