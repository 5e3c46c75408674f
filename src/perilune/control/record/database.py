"""Where the state lies: SQLite in the home by default, PostgreSQL where PERILUNE_DATABASE says so.

Both give the same promises: a writing transaction is alone from its beginning (so it never fails half-way for
want of a lock), an acknowledged commit outlives a power cut, a snapshot is one state, events only grow.
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
from abc import ABC, abstractmethod
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, select, table, text
from sqlalchemy.exc import ArgumentError, DatabaseError

from perilune.control.machines.providers import cluster_id
from perilune.control.record.home import Home
from perilune.control.record.migrations import LATEST, MIGRATIONS, migrate, schema_of, set_schema
from perilune.errors import PeriluneError, RequestError, WorkFailedError
from perilune.files import write_atomic

VARIABLE = "PERILUNE_DATABASE"
BUSY_SECONDS = 30.0
ROOM = 1 << 17  # bytes that SQLite may want at once for its write-ahead log
REPAIR = "`perilune rebuild` makes the record again from runs/; or restore a backup to a new home"
DEFERRED = {"begin": "DEFERRED"}  # execution options of a snapshot


class DamagedError(WorkFailedError):
    """The database cannot be read as it should be."""


class Database(ABC):
    """A place for the tables of one home.

    Attributes:
        engine: its connections; what begins a transaction there takes the write lock, unless `DEFERRED`.
        where: what people call it.
    """

    engine: Engine
    where: str

    @abstractmethod
    def schema(self, connection: Connection) -> int:
        """Number of the schema that it has; 0 for none yet."""

    @abstractmethod
    def set_schema(self, connection: Connection, number: int) -> None:
        """Write down which schema it has now, in the caller's transaction."""

    @abstractmethod
    def protect(self, connection: Connection) -> None:
        """Have the database itself refuse to change or delete events."""

    @abstractmethod
    def migrate(self, connection: Connection) -> str | None:
        """Bring it to the latest schema, in the caller's transaction; names the copy made before, if any."""

    @abstractmethod
    def damage(self, connection: Connection) -> str:
        """What is broken in it, found by reading all of it; "" when nothing is."""

    @abstractmethod
    def explain(self, error: DatabaseError) -> PeriluneError:
        """An error of the database, for people."""


def database_of(home: Home) -> Database:
    """The database of a home: the one it was begun with.

    Raises:
        RequestError: when PERILUNE_DATABASE is no URL, holds a password, or names another one than before.
    """
    kept = home.root / "database"
    begun = kept.read_text(encoding="utf-8").strip() if kept.exists() else ""
    asked = os.environ.get(VARIABLE, "")
    if not asked and not begun:
        return Sqlite(home)
    url = _url(asked or begun)
    told = url.render_as_string(hide_password=False)
    if (begun and told != begun) or (not begun and home.database.exists()):
        other = begun or str(home.database)
        raise RequestError(
            f"the state of this home lies in {other}",
            where=VARIABLE,
            remedy="leave the variable out, or move it: perilune backup, then perilune restore to a new home",
        )
    found = Postgres(url, f"perilune_{cluster_id(home)}")
    if not begun:
        found.check()
        write_atomic(kept, f"{told}\n")
    return found


def _url(given: str) -> URL:
    try:
        url = make_url(given)
    except ArgumentError:
        raise RequestError(
            "is no URL of a database", where=VARIABLE, remedy="postgresql://user@host/name"
        ) from None
    if url.get_backend_name() != "postgresql":
        remedy = "postgresql://user@host/name; without the variable, SQLite in the home"
        raise RequestError(f"names a {url.get_backend_name()} database", where=VARIABLE, remedy=remedy)
    if url.password is not None:
        remedy = "leave it out and use ~/.pgpass, PGPASSFILE or PGPASSWORD"
        raise RequestError("holds a password, which would be written down", where=VARIABLE, remedy=remedy)
    return url.set(drivername="postgresql")


class Sqlite(Database):
    """One file: WAL, `synchronous=FULL`."""

    def __init__(self, home: Home) -> None:
        self.home, self.where = home, str(home.database)
        self.engine = create_engine(f"sqlite:///{home.database}", connect_args={"timeout": BUSY_SECONDS})
        event.listen(self.engine, "connect", self._configure)
        event.listen(self.engine, "begin", self._begin)

    @staticmethod
    def _configure(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @staticmethod
    def _begin(connection: Any) -> None:
        mode = connection.get_execution_options().get("begin", "IMMEDIATE")
        connection.exec_driver_sql(f"BEGIN {mode}")

    def schema(self, connection: Connection) -> int:
        """Kept in the file's header."""
        return schema_of(connection)

    def set_schema(self, connection: Connection, number: int) -> None:
        """Kept in the file's header."""
        set_schema(connection, number)

    def protect(self, connection: Connection) -> None:
        """By triggers."""
        for verb in ("update", "delete"):
            connection.exec_driver_sql(
                f"CREATE TRIGGER events_no_{verb} BEFORE {verb} ON events"
                " BEGIN SELECT RAISE(ABORT, 'append-only'); END"
            )

    def migrate(self, connection: Connection) -> str | None:
        """After a copy of the file."""
        backup = migrate(connection, self.home.database)
        return backup.name if backup else None

    def damage(self, connection: Connection) -> str:
        """By SQLite's own check of every page and index."""
        found = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA integrity_check(3)")]
        return "" if found == ["ok"] else "; ".join(found)

    def explain(self, error: DatabaseError) -> PeriluneError:
        """By what SQLite says, and by the disk."""
        said = str(error.orig)
        full = shutil.disk_usage(self.home.root).free < ROOM
        if "full" in said or (
            "disk I/O" in said and full
        ):  # SQLite cannot always tell why it could not write
            remedy = "free some space (perilune gc --yes), or choose another disk with PERILUNE_HOME"
            return RequestError("the disk is full; nothing was changed", where=self.where, remedy=remedy)
        if "disk I/O" in said and resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
            what = f"it may not grow past this process's limit ({said})"
            return RequestError(what, where=self.where, remedy="raise `ulimit -f`")
        if "readonly" in said or "unable to open" in said:
            return RequestError(f"cannot write the state database ({said})", where=self.where)
        if "not a database" in said or "malformed" in said:
            return DamagedError(f"the state database is damaged ({said})", where=self.where, remedy=REPAIR)
        if "locked" in said:
            what = f"another process has held the state database for {BUSY_SECONDS:.0f} s"
            return WorkFailedError(what, where=self.where)
        return WorkFailedError(f"state database: {said}", where=self.where)


class Postgres(Database):
    """A schema of a PostgreSQL database, named after the home, so that several homes share one server.

    Args:
        schema: its name; letters, digits and "_".
    """

    def __init__(self, url: URL, schema: str) -> None:
        self._schema = schema
        self._lock = int.from_bytes(hashlib.sha256(schema.encode()).digest()[:8], "big", signed=True)
        self.where = f"{url.render_as_string()} (schema {schema})"
        settings = {
            "search_path": schema,
            "lock_timeout": f"{BUSY_SECONDS * 1000:.0f}",
            "synchronous_commit": "on",
        }
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        try:
            self.engine = create_engine(
                url.set(drivername="postgresql+psycopg"),
                connect_args={"connect_timeout": int(BUSY_SECONDS), "options": options},
                pool_pre_ping=True,
            )
        except ImportError:
            raise RequestError(
                "PostgreSQL needs a package", where=VARIABLE, remedy="pip install 'perilune[postgresql]'"
            ) from None
        event.listen(self.engine, "begin", self._begin)

    def _begin(self, connection: Any) -> None:
        if connection.get_execution_options().get("begin") == "DEFERRED":
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        else:  # what follows sees all that was committed before the lock was got
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({self._lock})")

    def check(self) -> None:
        """Connect.

        Raises:
            PeriluneError: when that is impossible.
        """
        try:
            with self.engine.connect():
                pass
        except DatabaseError as error:
            raise self.explain(error) from error

    def schema(self, connection: Connection) -> int:
        """Kept in a table of its own."""
        connection.exec_driver_sql(f'CREATE SCHEMA IF NOT EXISTS "{self._schema}"')
        connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS schema_version (number INTEGER NOT NULL)")
        return int(connection.exec_driver_sql("SELECT max(number) FROM schema_version").scalar_one() or 0)

    def set_schema(self, connection: Connection, number: int) -> None:
        """Kept in a table of its own."""
        connection.execute(text("INSERT INTO schema_version VALUES (:number)"), {"number": number})

    def protect(self, connection: Connection) -> None:
        """By a trigger."""
        connection.exec_driver_sql(
            "CREATE FUNCTION events_append_only() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'append-only'; END $$"
        )
        connection.exec_driver_sql(
            "CREATE TRIGGER events_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON events"
            " FOR EACH STATEMENT EXECUTE FUNCTION events_append_only()"
        )

    def migrate(self, connection: Connection) -> str | None:
        """By the same statements; the server's own backups are its owner's."""
        for number in range(self.schema(connection) + 1, LATEST + 1):
            for statement in MIGRATIONS[number]:
                connection.exec_driver_sql(statement)
            self.set_schema(connection, number)
        return None

    def damage(self, connection: Connection) -> str:
        """By reading every row, for which the server checks its pages where it keeps checksums."""
        listed = "SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema()"
        for (name,) in connection.exec_driver_sql(listed).all():
            for _ in connection.execute(select(text("*")).select_from(table(name))).partitions(10_000):
                pass
        return ""

    def explain(self, error: DatabaseError) -> PeriluneError:
        """By what the server says."""
        said = str(error.orig).strip().partition("\n")[0]
        if "lock timeout" in said:
            what = f"another process has held the state database for {BUSY_SECONDS:.0f} s"
            return WorkFailedError(what, where=self.where)
        if "No space left" in said or "disk full" in said:
            return RequestError("the database's disk is full; nothing was changed", where=self.where)
        if "connection" in said or "password" in said or "does not exist" in said:
            remedy = f"check the server and {VARIABLE}; the command can be run again"
            return WorkFailedError(
                f"cannot reach the state database ({said})", where=self.where, remedy=remedy
            )
        return WorkFailedError(f"state database: {said}", where=self.where)
