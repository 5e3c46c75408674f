"""A failed stage as an error: whether the request or the work was at fault, and what to do."""

from __future__ import annotations

from perilune.control.runs.progress import StageFailed
from perilune.errors import PeriluneError, RequestError, WorkFailedError
from perilune.execution.verdict import Cause

REQUEST_CAUSES = frozenset(
    {Cause.REQUEST, Cause.DISK_FULL, Cause.BUNDLE_REJECTED, Cause.HOST_REFUSED}
)  # exit code 2

REMEDY = "  try: "  # what the last line of an error that has a remedy begins with


def explain_failure(event: StageFailed) -> PeriluneError:
    """A failed stage as the error that ends the command."""
    kind = RequestError if event.cause in REQUEST_CAUSES else WorkFailedError
    where = f"stage {event.stage}, run {event.run_id}"
    if event.cancelled:
        return kind("cancelled", where=where, remedy="the same command goes on from its last checkpoint")
    what, _, own_remedy = (event.message or event.cause).partition(f"\n{REMEDY}")
    tail = f"\n  its log ends:\n{_indented(event.log_tail)}" if event.cause == Cause.CRASHED else ""
    remedy = f"perilune logs {event.run_id}; the same command tries again, from the last checkpoint"
    if kind is RequestError:
        remedy = "put that right, and give the same command again"
    return kind(what + tail, where=where, remedy=own_remedy or remedy)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
