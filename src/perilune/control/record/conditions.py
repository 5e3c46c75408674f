"""Conditions: the last error that keeps a run or a machine from making progress.

Work on a run, on the cleanup of an attempt and on a rented machine happens inside `Conditions.guard`. An
error in that block is recorded as a condition of the run or machine and affects nothing else. The next
success clears it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import select

from perilune.control.record.store import Condition, Store, clear_condition, record_event
from perilune.execution.verdict import describe_error
from perilune.redaction import redact_text

HOME_CONDITION = ""  # run id of conditions that belong to no run


@dataclass
class GuardedWork:
    """The result of a block of `Conditions.guard`: its exception, or None."""

    error: Exception | None = None


class Conditions:
    """The conditions of one home."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @contextmanager
    def guard(self, run_id: str, about: str, *, clears: bool = True) -> Iterator[GuardedWork]:
        """Yield a block whose error becomes a condition of the run, and whose success clears the condition.

        The error is not raised again. The block raises PeriluneError only if the condition cannot be
        recorded, which is an error of the home.

        Args:
            about: `RUN_CONDITION`, the result of `cleanup_subject`, or "machine KEY".
            clears: whether success clears the condition. A block that does only part of the work passes
                False.
        """
        work = GuardedWork()
        try:
            yield work
        except Exception as error:
            work.error = error
            self.raise_condition(run_id, about, describe_error(error))
        else:
            if clears:
                self.clear(run_id, about)

    def all(self, run_id: str | None = None) -> list[Condition]:
        """Return all conditions, or those of one run, oldest first."""
        query = select(Condition).order_by(Condition.since)
        if run_id is not None:
            query = query.where(Condition.run_id == run_id)
        return self.store.read(query)

    def raise_condition(self, run_id: str, about: str, message: str) -> None:
        """Record a condition, unless the same one is recorded already."""
        message = redact_text(message)
        if self._message(run_id, about) == message:
            return
        with self.store.transaction() as session:
            row = session.get(Condition, (run_id, about))
            if row is not None:
                row.message = message  # no event: the message may differ at every try
            else:
                session.add(Condition(run_id=run_id, about=about, message=message, since=time.time()))
                record_event(session, "condition.raised", run_id=run_id or None, about=about, why=message)

    def clear(self, run_id: str, about: str) -> None:
        if self._message(run_id, about):
            with self.store.transaction() as session:
                clear_condition(session, run_id, about)

    def _message(self, run_id: str, about: str) -> str:
        with self.store.snapshot() as session:
            known = session.get(Condition, (run_id, about))
        return "" if known is None else known.message


def cleanup_subject(number: int) -> str:
    """Return the subject of a condition that keeps an ended attempt from being cleaned up where it ran."""
    return f"cleanup of attempt {number}"
