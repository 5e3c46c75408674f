"""What keeps a run or a machine from making progress: its last error, recorded as its condition.

Work on a run, on the cleanup of an attempt and on a rented machine happens inside `Conditions.of`. An error
there is recorded for that run or machine and ends nothing else; the next success clears it.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select

from perilune.control.record.store import Condition, Store, clear_condition, record
from perilune.errors import PeriluneError
from perilune.redaction import redact_text

HOME = ""  # run id of conditions that belong to no run


@dataclass
class Work:
    """A block in which an error is recorded as a condition, and does not raise.

    Attributes:
        error: what the block raised, or None.
    """

    conditions: Conditions
    run_id: str
    about: str
    clears: bool
    error: Exception | None = None

    def __enter__(self) -> Work:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is not None and not isinstance(error, Exception):
            return False
        self.error = error
        if error is not None:
            self.conditions.note(self.run_id, self.about, describe(error))
        elif self.clears:
            self.conditions.clear(self.run_id, self.about)
        return True


class Conditions:
    """The conditions of one home."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def of(self, run_id: str, about: str, *, clears: bool = True) -> Work:
        """A block whose error is the condition of a run from now on, and whose success ends the condition.

        Where the condition cannot be recorded it raises that PeriluneError, which is an error of the home.

        Args:
            about: `store.RUN`, `cleanup_of` an attempt, or `machine KEY`.
            clears: whether success ends it. Who does only part of the work cannot tell.
        """
        return Work(self, run_id, about, clears)

    def all(self, run_id: str | None = None) -> list[Condition]:
        """All conditions, or those of one run, oldest first."""
        query = select(Condition).order_by(Condition.since)
        if run_id is not None:
            query = query.where(Condition.run_id == run_id)
        with self.store.snapshot() as session:
            return list(session.scalars(query))

    def note(self, run_id: str, about: str, message: str) -> None:
        """Record a condition, unless it is known."""
        message = redact_text(message)
        if self._message(run_id, about) == message:
            return
        with self.store.transaction() as session:
            row = session.get(Condition, (run_id, about))
            if row is not None:
                row.message = message  # no event: messages may differ at every try
            else:
                session.add(Condition(run_id=run_id, about=about, message=message, since=time.time()))
                record(session, "condition.raised", run_id=run_id or None, about=about, why=message)

    def clear(self, run_id: str, about: str) -> None:
        """End a condition, if there is one."""
        if self._message(run_id, about):
            with self.store.transaction() as session:
                clear_condition(session, run_id, about)

    def _message(self, run_id: str, about: str) -> str:
        with self.store.snapshot() as session:
            known = session.get(Condition, (run_id, about))
        return "" if known is None else known.message


def cleanup_of(number: int) -> str:
    """What a condition is about that keeps an ended attempt from being removed where it ran."""
    return f"cleanup of attempt {number}"


def describe(error: Exception) -> str:
    """An error in words; one that nobody expected with its type and place."""
    if isinstance(error, PeriluneError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
