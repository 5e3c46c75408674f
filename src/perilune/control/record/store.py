"""The tables of a home: current state, an append-only event log, and intended side effects.

Every change of state is made in the transaction that appends its event. Assigning a state raises unless
`transitions` allows it. `database` decides where the tables are stored.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

from sqlalchemy import JSON, Connection, Float, ForeignKey, ForeignKeyConstraint, Select, false, select, text
from sqlalchemy import Row as SqlRow
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, validates

from perilune.control.record.database import SNAPSHOT_OPTIONS, Postgres, Sqlite, open_database
from perilune.control.record.home import Home
from perilune.control.record.migrations import LATEST
from perilune.control.record.transitions import (
    AttemptState,
    Cleanup,
    MachineState,
    Reachability,
    RunState,
    State,
    check_transition,
)
from perilune.files import canonical_json, sha256_bytes
from perilune.redaction import redact_document, redact_text

RUN_CONDITION = "run"  # subject of a condition of the run itself, not of an attempt or a machine
T = TypeVar("T")


class Base(DeclarativeBase):
    """Base of all tables."""


class _Stateful:
    """Checks transitions, and redacts secrets in messages."""

    states: ClassVar[type[State]]

    @validates("state")
    def _check_state(self, _: str, new: str) -> str:
        old: str | None = self.state  # type: ignore[attr-defined]
        if old is not None:
            check_transition(self.states(old), self.states(new))
        return new

    @validates("message", "reason", "refused")
    def _without_secrets(self, _: str, new: str) -> str:
        return redact_text(new)


class Experiment(Base):
    """A submitted recipe. The same resolved recipe is the same experiment."""

    __tablename__ = "experiments"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    recipe_digest: Mapped[str] = mapped_column(unique=True)
    created: Mapped[float]
    used: Mapped[float]  # time of its last submission
    # Whether later stages start by themselves.
    requested: Mapped[bool] = mapped_column("wanted", default=False, server_default=text("FALSE"))
    # Number of its last submission.
    submission: Mapped[int] = mapped_column("wish", default=0, server_default=text("0"))
    template: Mapped[dict[str, Any] | None] = mapped_column(JSON)  # of that submission; None is this machine


class Stage(Base):
    """A stage of an experiment, and its run. Stages of several experiments may share a run."""

    __tablename__ = "stages"

    experiment_id: Mapped[str] = mapped_column(ForeignKey("experiments.id"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    task: Mapped[str]
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    # The submission of its experiment that its run belongs to.
    submission: Mapped[int] = mapped_column("wish", default=0, server_default=text("0"))


class Run(_Stateful, Base):
    """A submitted stage. `state` is only its outcome; `desired` is what the user requests now."""

    __tablename__ = "runs"
    states = RunState

    id: Mapped[str] = mapped_column(primary_key=True)
    submit_key: Mapped[str] = mapped_column(unique=True)
    experiment_id: Mapped[str] = mapped_column(ForeignKey("experiments.id"), index=True)
    stage: Mapped[str]
    task: Mapped[str]
    bundle_digest: Mapped[str] = mapped_column(index=True)
    state: Mapped[str] = mapped_column(default=RunState.QUEUED.value)
    desired: Mapped[str] = mapped_column(default=RunState.SUCCEEDED.value)
    forced: Mapped[bool] = mapped_column(default=False, server_default=false())  # give up without proof
    current_epoch: Mapped[int] = mapped_column(default=0)
    manifest_digest: Mapped[str | None]  # of the committed result
    retry_of: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    cause: Mapped[str] = mapped_column(default="")
    message: Mapped[str] = mapped_column(default="")
    not_before: Mapped[float] = mapped_column(default=0.0)
    created: Mapped[float]
    ended: Mapped[float | None]


class Attempt(_Stateful, Base):
    """One try of a run. Outcome, reachability and cleanup are independent fields."""

    __tablename__ = "attempts"
    states = AttemptState

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


class Operation(Base):
    """A side effect. Its intent is committed before it happens, and its key identifies it afterwards."""

    __tablename__ = "operations"
    __table_args__ = (ForeignKeyConstraint(["run_id", "epoch"], ["attempts.run_id", "attempts.number"]),)

    key: Mapped[str] = mapped_column(primary_key=True)  # run/epoch/verb/ordinal
    run_id: Mapped[str]
    epoch: Mapped[int]
    verb: Mapped[str]
    status: Mapped[str] = mapped_column(default="intent")  # then "done"
    created: Mapped[float]
    ended: Mapped[float | None]


class Machine(_Stateful, Base):
    """One rented machine, recorded before it is requested and kept after it is proven gone."""

    __tablename__ = "machines"
    states = MachineState

    key: Mapped[str] = mapped_column(primary_key=True)  # text of its execution.providers MachineKey
    provider: Mapped[str]
    run_id: Mapped[str] = mapped_column(index=True)  # no foreign key: it may be known only by its tag
    epoch: Mapped[int]
    rank: Mapped[int]
    state: Mapped[str] = mapped_column(default=MachineState.REQUESTED.value)
    reason: Mapped[str] = mapped_column(default="")  # why it is terminated
    kind: Mapped[str]
    price: Mapped[float]  # currency units per hour
    lease: Mapped[dict[str, Any]] = mapped_column(JSON)
    remote_id: Mapped[str] = mapped_column(default="")
    leased: Mapped[dict[str, Any]] = mapped_column(JSON)  # Instant of its lease's start
    asked: Mapped[dict[str, Any] | None] = mapped_column(JSON)  # Instant of the last request to create it
    refused: Mapped[str] = mapped_column(default="")  # why the provider refused to create it
    notice: Mapped[bool] = mapped_column(default=False)  # its provider has announced a preemption
    idle_since: Mapped[dict[str, Any] | None] = mapped_column(JSON)  # Instant
    missing_since: Mapped[dict[str, Any] | None] = mapped_column(JSON)  # Instant
    unseen_since: Mapped[dict[str, Any] | None] = mapped_column(JSON)  # Instant
    terminate_calls: Mapped[int] = mapped_column(default=0)
    cost: Mapped[float] = mapped_column(default=0.0)  # final once it is gone
    created: Mapped[float]
    ended: Mapped[float | None]


class EarlierUse(Base):
    """An attempt that had a machine before the attempt that has it now, and its share of the cost."""

    __tablename__ = "earlier_uses"

    machine_key: Mapped[str] = mapped_column(ForeignKey("machines.key"), primary_key=True)
    run_id: Mapped[str] = mapped_column(primary_key=True, index=True)
    epoch: Mapped[int] = mapped_column(primary_key=True)
    cost: Mapped[float]  # currency units


class Condition(Base):
    """An error that keeps a run, the cleanup of an attempt or a machine from making progress."""

    __tablename__ = "conditions"

    run_id: Mapped[str] = mapped_column(primary_key=True)  # no foreign key: machines may belong to no run
    about: Mapped[str] = mapped_column(primary_key=True)
    message: Mapped[str]
    since: Mapped[float] = mapped_column(Float)  # the default, DOUBLE, is not a PostgreSQL type

    def __str__(self) -> str:
        return self.message if self.about == RUN_CONDITION else f"{self.about}: {self.message}"


class Event(Base):
    """An event. Append-only; the hash of each row covers the row before it."""

    __tablename__ = "events"

    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    time: Mapped[float]
    run_id: Mapped[str | None] = mapped_column(index=True)
    epoch: Mapped[int | None]
    kind: Mapped[str]
    detail: Mapped[dict[str, Any]] = mapped_column(JSON)
    hash: Mapped[str]


class Store:
    """The database of one home. Opening it creates or migrates it as necessary.

    Raises:
        RequestError: it is newer than this program, or cannot be written.
        WorkFailedError: it is damaged.
    """

    def __init__(self, home: Home) -> None:
        self.database = open_database(home)
        self.engine = self.database.engine
        self._reader = self.engine.execution_options(**SNAPSHOT_OPTIONS)
        with self.transaction() as session:
            connection = session.connection()
            schema = self.database.schema(connection)
            if schema == 0:
                create_tables(self.database, connection)
            elif backup := self.database.migrate(connection):
                record_event(session, "store.migrated", found=schema, now=LATEST, backup=backup)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Yield a session that holds the write lock; it commits at the end and rolls back on any exception.

        Rows stay readable after the block.

        Raises:
            WorkFailedError: the database is damaged, or another process holds its lock for too long.
            RequestError: the disk is full, or the file is not writable.
        """
        try:
            with Session(self.engine, expire_on_commit=False) as session, session.begin():
                yield session
        except DatabaseError as error:
            raise self.database.translate_error(error) from error

    @contextmanager
    def snapshot(self) -> Iterator[Session]:
        """Yield a read-only session on a consistent state of the database, without the write lock."""
        try:
            with Session(self._reader, expire_on_commit=False, autoflush=False) as session:
                yield session
        except DatabaseError as error:
            raise self.database.translate_error(error) from error

    def read(self, query: Select[T]) -> list[T]:
        """Return what a query selects, from a snapshot."""
        with self.snapshot() as session:
            return list(session.scalars(query))

    def close(self) -> None:
        self.engine.dispose()


def create_tables(database: Sqlite | Postgres, connection: Connection) -> None:
    """Create all tables in the latest schema, in the caller's transaction."""
    Base.metadata.create_all(connection)
    database.protect(connection)
    database.set_schema(connection)


def record_event(
    session: Session, kind: str, *, run_id: str | None = None, epoch: int | None = None, **detail: Any
) -> None:
    """Append an event in the caller's transaction."""
    last = session.scalars(select(Event).order_by(Event.seq.desc()).limit(1)).first()
    row = Event(time=time.time(), run_id=run_id, epoch=epoch, kind=kind, detail=redact_document(detail))
    row.hash = event_hash(last.hash if last else "", row)
    session.add(row)
    session.flush()


def verify_events(session: Session, after: int = 0, previous: str = "") -> int | None:
    """Return the number of the first event whose hash does not match the event before it, or None.

    Args:
        after: start after this event, whose hash is `previous`.
    """
    columns = (Event.seq, Event.time, Event.run_id, Event.epoch, Event.kind, Event.detail, Event.hash)
    query = select(*columns).where(Event.seq > after).order_by(Event.seq)
    for row in session.execute(query.execution_options(yield_per=10_000)):
        if row.hash != event_hash(previous, row):
            return int(row.seq)
        previous = row.hash
    return None


def move_run(session: Session, run: Run, state: RunState, *, cause: str = "", message: str = "") -> None:
    """Change the state of a run, and record the event.

    Raises:
        IllegalTransitionError: the transition is not allowed.
    """
    run.state = state.value
    run.cause, run.message = cause, message
    if state.is_terminal:
        run.ended = max(run.created, time.time())  # the wall clock may have been set back
        clear_condition(session, run.id, RUN_CONDITION)
    detail = _detail(cause, message)
    record_event(session, f"run.{state.value}", run_id=run.id, epoch=run.current_epoch, **detail)


def clear_condition(session: Session, run_id: str, about: str) -> None:
    """Clear a condition, if there is one, in the caller's transaction."""
    row = session.get(Condition, (run_id, about))
    if row is not None:
        session.delete(row)
        record_event(session, "condition.cleared", run_id=run_id or None, about=about)


def move_attempt(
    session: Session, attempt: Attempt, state: AttemptState, *, cause: str = "", message: str = ""
) -> None:
    """Change the state of an attempt, and record the event.

    Raises:
        IllegalTransitionError: the transition is not allowed.
    """
    attempt.state = state.value
    if state.is_terminal:
        attempt.cause, attempt.message = cause, message
        attempt.ended = max(attempt.created, time.time())
    detail = _detail(cause, message)
    record_event(session, f"attempt.{state.value}", run_id=attempt.run_id, epoch=attempt.number, **detail)


def _detail(cause: str, message: str) -> dict[str, str]:
    return {name: text for name, text in (("cause", cause), ("message", message)) if text}


def event_hash(previous: str, row: Event | SqlRow[Any]) -> str:
    """Return the SHA-256 of an event and the hash of the event before it."""
    content: Mapping[str, Any] = {
        "previous": previous,
        "time": row.time,
        "run": row.run_id,
        "epoch": row.epoch,
        "kind": row.kind,
        "detail": row.detail,
    }
    return sha256_bytes(canonical_json(content))
