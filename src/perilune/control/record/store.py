"""What was wanted and what was seen: projections, an append-only event log, and intents.

Every change of a projection is made in the transaction that appends its event. States are guarded by the
tables in `transitions`: assigning a state that may not follow raises. Where the tables lie is `database`'s.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sqlalchemy import JSON, Float, ForeignKey, ForeignKeyConstraint, false, select, text
from sqlalchemy import Row as SqlRow
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, validates

from perilune.control.record.database import DEFERRED, database_of
from perilune.control.record.home import Home
from perilune.control.record.migrations import LATEST
from perilune.control.record.transitions import (
    AttemptState,
    Cleanup,
    MachineState,
    Reachability,
    RunState,
    check_attempt,
    check_machine,
    check_run,
)
from perilune.files import canonical_json, sha256_bytes
from perilune.redaction import redact_document, redact_text

RUN = "run"  # what a condition is about: the run itself, else one of its attempts or machines


class Base(DeclarativeBase):
    """Base of all tables."""


class Experiment(Base):
    """One submission of a recipe; the same resolved recipe is the same experiment."""

    __tablename__ = "experiments"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    recipe_digest: Mapped[str] = mapped_column(unique=True)
    created: Mapped[float]
    used: Mapped[float]  # when it was last submitted: the latest experiment is the largest
    requested: Mapped[bool] = mapped_column(
        "wanted", default=False, server_default=text("FALSE")
    )  # are stages to be run?
    submission: Mapped[int] = mapped_column(
        "wish", default=0, server_default=text("0")
    )  # how often that was asked for
    template: Mapped[dict[str, Any] | None] = mapped_column(JSON)  # where it was asked for; None is here


class Stage(Base):
    """Which run stands for a stage of an experiment. A run may serve stages of several experiments."""

    __tablename__ = "stages"

    experiment_id: Mapped[str] = mapped_column(ForeignKey("experiments.id"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    task: Mapped[str]
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    submission: Mapped[int] = mapped_column(
        "wish", default=0, server_default=text("0")
    )  # of its experiment, that it fulfils


class Run(Base):
    """What was wanted. `state` is the outcome and nothing else; `desired` is what the user asks for now."""

    __tablename__ = "runs"

    id: Mapped[str] = mapped_column(primary_key=True)
    submit_key: Mapped[str] = mapped_column(unique=True)
    experiment_id: Mapped[str] = mapped_column(ForeignKey("experiments.id"), index=True)
    stage: Mapped[str]
    task: Mapped[str]
    bundle_digest: Mapped[str] = mapped_column(index=True)
    state: Mapped[str] = mapped_column(default=RunState.QUEUED.value)
    desired: Mapped[str] = mapped_column(default=RunState.SUCCEEDED.value)
    forced: Mapped[bool] = mapped_column(default=False, server_default=false())  # end it without proof
    current_epoch: Mapped[int] = mapped_column(default=0)
    manifest_digest: Mapped[str | None]  # of the committed result
    retry_of: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    cause: Mapped[str] = mapped_column(default="")
    message: Mapped[str] = mapped_column(default="")
    not_before: Mapped[float] = mapped_column(default=0.0)
    created: Mapped[float]
    ended: Mapped[float | None]

    @validates("state")
    def _state_may_follow(self, _: str, new: str) -> str:
        if self.state is not None:
            check_run(RunState(self.state), RunState(new))
        return new

    @validates("message")
    def _without_secrets(self, _: str, new: str) -> str:
        return redact_text(new)


class Attempt(Base):
    """One try on one machine. Outcome, reachability and cleanup are three fields; none overwrites another."""

    __tablename__ = "attempts"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)  # the fencing epoch
    state: Mapped[str] = mapped_column(default=AttemptState.PLANNED.value)
    reachability: Mapped[str] = mapped_column(default=Reachability.UNKNOWN.value)
    unreachable_since: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    cleanup: Mapped[str] = mapped_column(default=Cleanup.NONE.value)
    placement: Mapped[str]
    launcher: Mapped[str]
    cause: Mapped[str] = mapped_column(default="")
    message: Mapped[str] = mapped_column(default="")
    exit_code: Mapped[int | None]
    signal: Mapped[int | None]
    manifest_digest: Mapped[str | None]
    created: Mapped[float]
    ended: Mapped[float | None]

    @validates("state")
    def _state_may_follow(self, _: str, new: str) -> str:
        if self.state is not None:
            check_attempt(AttemptState(self.state), AttemptState(new))
        return new

    @validates("message")
    def _without_secrets(self, _: str, new: str) -> str:
        return redact_text(new)


class Operation(Base):
    """An effect on the world: its intent is committed before it happens, and it is findable by its key."""

    __tablename__ = "operations"
    __table_args__ = (ForeignKeyConstraint(["run_id", "epoch"], ["attempts.run_id", "attempts.number"]),)

    key: Mapped[str] = mapped_column(primary_key=True)  # run/epoch/verb/ordinal
    run_id: Mapped[str]
    epoch: Mapped[int]
    verb: Mapped[str]
    status: Mapped[str] = mapped_column(default="intent")  # then "done"
    created: Mapped[float]
    ended: Mapped[float | None]


class Machine(Base):
    """One rented machine, from the intent to rent it on. It stays until it is proven gone, and after."""

    __tablename__ = "machines"

    key: Mapped[str] = mapped_column(primary_key=True)  # text of its execution.providers MachineKey
    provider: Mapped[str]
    run_id: Mapped[str] = mapped_column(index=True)  # no foreign key: it may be found by its tag alone
    epoch: Mapped[int]
    rank: Mapped[int]
    state: Mapped[str] = mapped_column(default=MachineState.REQUESTED.value)
    reason: Mapped[str] = mapped_column(default="")  # why it is to go
    kind: Mapped[str]
    price: Mapped[float]  # currency units per hour
    lease: Mapped[dict[str, Any]] = mapped_column(JSON)
    remote_id: Mapped[str] = mapped_column(default="")
    leased: Mapped[dict[str, Any]] = mapped_column(JSON)  # Instant from which its lease and its cost count
    asked: Mapped[dict[str, Any] | None] = mapped_column(JSON)  # Instant of the last request to make it
    refused: Mapped[str] = mapped_column(default="")  # what the provider said when it would make nothing
    notice: Mapped[bool] = mapped_column(default=False)  # its provider has said that it will take it away
    idle_since: Mapped[dict[str, Any] | None] = mapped_column(JSON)  # Instant
    missing_since: Mapped[dict[str, Any] | None] = mapped_column(JSON)  # Instant of the first look without it
    unseen_since: Mapped[dict[str, Any] | None] = mapped_column(JSON)  # Instant since its provider is silent
    terminate_calls: Mapped[int] = mapped_column(default=0)
    cost: Mapped[float] = mapped_column(default=0.0)  # final once it is gone
    created: Mapped[float]
    ended: Mapped[float | None]

    @validates("state")
    def _state_may_follow(self, _: str, new: str) -> str:
        if self.state is not None:
            check_machine(MachineState(self.state), MachineState(new))
        return new

    @validates("reason", "refused")
    def _without_secrets(self, _: str, new: str) -> str:
        return redact_text(new)


class Condition(Base):
    """What keeps a run, an attempt's cleanup or a machine from making progress. Gone once it succeeds."""

    __tablename__ = "conditions"

    run_id: Mapped[str] = mapped_column(primary_key=True)  # no foreign key: machines may belong to no run
    about: Mapped[str] = mapped_column(primary_key=True)
    message: Mapped[str]
    since: Mapped[float] = mapped_column(Float)  # DOUBLE, the default, is no type of PostgreSQL

    def __str__(self) -> str:
        return self.message if self.about == RUN else f"{self.about}: {self.message}"


class Event(Base):
    """One thing that happened. Append-only; each row's hash covers the row before it."""

    __tablename__ = "events"

    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    time: Mapped[float]
    run_id: Mapped[str | None] = mapped_column(index=True)
    epoch: Mapped[int | None]
    kind: Mapped[str]
    detail: Mapped[dict[str, Any]] = mapped_column(JSON)
    hash: Mapped[str]


class Store:
    """The database of one home, made where there is none and brought forward where it is older.

    Raises:
        RequestError: when it is newer than this program, or cannot be written.
        WorkFailedError: when it is damaged.
    """

    def __init__(self, home: Home) -> None:
        self.database = database_of(home)
        self.engine = self.database.engine
        with self.transaction() as session:
            connection = session.connection()
            found = self.database.schema(connection)
            if found == 0:
                Base.metadata.create_all(connection)
                self.database.protect(connection)
                self.database.set_schema(connection, LATEST)
            elif backup := self.database.migrate(connection):
                record(session, "store.migrated", found=found, now=LATEST, backup=backup)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """A session that holds the write lock; commits at the end, rolls back on any exception.

        Rows stay readable after the block.

        Raises:
            WorkFailedError: the file is damaged, or held by another process for too long.
            RequestError: the disk is full, or the file cannot be written to.
        """
        try:
            with Session(self.engine, expire_on_commit=False) as session, session.begin():
                yield session
        except DatabaseError as error:
            raise self.database.explain(error) from error

    @contextmanager
    def snapshot(self) -> Iterator[Session]:
        """A session on one consistent state of the database; takes no write lock."""
        reader = self.engine.execution_options(**DEFERRED)
        try:
            with Session(reader, expire_on_commit=False, autoflush=False) as session:
                yield session
        except DatabaseError as error:
            raise self.database.explain(error) from error

    def close(self) -> None:
        """Give back connections."""
        self.engine.dispose()


def record(
    session: Session, kind: str, *, run_id: str | None = None, epoch: int | None = None, **detail: Any
) -> None:
    """Append an event in the caller's transaction."""
    last = session.scalars(select(Event).order_by(Event.seq.desc()).limit(1)).first()
    row = Event(time=time.time(), run_id=run_id, epoch=epoch, kind=kind, detail=redact_document(detail))
    row.hash = event_hash(last.hash if last else "", row)
    session.add(row)
    session.flush()


def verify_events(session: Session, after: int = 0, previous: str = "") -> int | None:
    """Sequence number of the first event that does not follow from the one before it, or None.

    Args:
        after: begin with the event after this one, whose hash is `previous`.
    """
    columns = (Event.seq, Event.time, Event.run_id, Event.epoch, Event.kind, Event.detail, Event.hash)
    query = select(*columns).where(Event.seq > after).order_by(Event.seq)
    for row in session.execute(query.execution_options(yield_per=10_000)):
        if row.hash != event_hash(previous, row):
            return int(row.seq)
        previous = row.hash
    return None


def move_run(session: Session, run: Run, state: RunState, *, cause: str = "", message: str = "") -> None:
    """Give a run its next state, with the event that says so.

    Raises:
        IllegalTransitionError: when that state may not follow.
    """
    run.state = state.value
    run.cause, run.message = cause, message
    if state.terminal:
        run.ended = time.time()
        clear_condition(session, run.id, RUN)
    record(session, f"run.{state.value}", run_id=run.id, epoch=run.current_epoch, **_said(cause, message))


def clear_condition(session: Session, run_id: str, about: str) -> None:
    """End a condition, if there is one, in the caller's transaction."""
    row = session.get(Condition, (run_id, about))
    if row is not None:
        session.delete(row)
        record(session, "condition.cleared", run_id=run_id or None, about=about)


def move_attempt(
    session: Session, attempt: Attempt, state: AttemptState, *, cause: str = "", message: str = ""
) -> None:
    """Give an attempt its next state, with the event that says so.

    Raises:
        IllegalTransitionError: when that state may not follow.
    """
    attempt.state = state.value
    if state.terminal:
        attempt.cause, attempt.message, attempt.ended = cause, message, time.time()
    record(
        session,
        f"attempt.{state.value}",
        run_id=attempt.run_id,
        epoch=attempt.number,
        **_said(cause, message),
    )


def _said(cause: str, message: str) -> dict[str, str]:
    return {name: text for name, text in (("cause", cause), ("message", message)) if text}


def event_hash(previous: str, row: Event | SqlRow[Any]) -> str:
    """SHA-256 over an event and the hash of the one before it."""
    content: Mapping[str, Any] = {
        "previous": previous,
        "time": row.time,
        "run": row.run_id,
        "epoch": row.epoch,
        "kind": row.kind,
        "detail": row.detail,
    }
    return sha256_bytes(canonical_json(content))
