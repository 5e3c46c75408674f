"""The database of a home: SQLite in the home by default, PostgreSQL if PERILUNE_DATABASE names one.

Both guarantee the same: a writing transaction holds the write lock from its start, so it never fails half-way
for lack of a lock; an acknowledged commit survives a power failure; a snapshot is consistent; events are
append-only.
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
from typing import Any

from sqlalchemy import URL, Connection, create_engine, event, make_url, select, table, text
from sqlalchemy.exc import ArgumentError, DatabaseError

from perilune.control.machines.providers import cluster_id
from perilune.control.record.home import Home
from perilune.control.record.migrations import LATEST, OLDEST, copy_database, migrate
from perilune.errors import PeriluneError, RequestError, WorkFailedError, requires_extra
from perilune.files import write_atomic

URL_VARIABLE = "PERILUNE_DATABASE"
BUSY_SECONDS = 30.0
WAL_BYTES = 1 << 17  # bytes that SQLite may need at once for its write-ahead log
REPAIR_REMEDY = "`perilune rebuild` recreates the record from runs/; or restore a backup to a new home"
LOCKED_MESSAGE = f"another process has held the state database for {BUSY_SECONDS:.0f} s"
LOCKED_REMEDY = "wait for the other command or stop it, then run this one again"
SNAPSHOT_OPTIONS = {"begin": "DEFERRED"}  # execution options of a snapshot


class DamagedError(WorkFailedError):
    """The database is corrupt."""


def open_database(home: Home) -> Sqlite | Postgres:
    """Return the database of a home. A home stays with the database that it started with.

    Raises:
        RequestError: PERILUNE_DATABASE is not a URL, contains a password, or names another database than
            before.
    """
    stored = home.root / "database"
    first = stored.read_text(encoding="utf-8").strip() if stored.exists() else ""
    given = os.environ.get(URL_VARIABLE, "")
    if not given and not first:
        return Sqlite(home)
    url = _parse_url(given or first)
    text = url.render_as_string(hide_password=False)
    if (first and text != first) or (not first and home.database.exists()):
        other = first or str(home.database)
        raise RequestError(
            f"the state of this home is in {other}",
            where=URL_VARIABLE,
            remedy="unset it; to move the state, run perilune backup, then perilune restore to a new home",
        )
    database = Postgres(url, f"perilune_{cluster_id(home)}")
    if not first:
        database.check()
        write_atomic(stored, f"{text}\n")
    return database


def _parse_url(given: str) -> URL:
    try:
        url = make_url(given)
    except ArgumentError:
        raise RequestError(
            "not a database URL", where=URL_VARIABLE, remedy="postgresql://user@host/name"
        ) from None
    if url.get_backend_name() != "postgresql":
        remedy = "postgresql://user@host/name; unset the variable to use SQLite in the home"
        raise RequestError(f"{url.get_backend_name()} is not supported", where=URL_VARIABLE, remedy=remedy)
    if url.password is not None or any("password" in name for name in url.query):
        remedy = "remove it and use ~/.pgpass, PGPASSFILE or PGPASSWORD"
        raise RequestError(
            "the URL contains a password, which would be stored", where=URL_VARIABLE, remedy=remedy
        )
    return url.set(drivername="postgresql")


class Sqlite:
    """One SQLite file, with a write-ahead log and `synchronous=FULL`.

    Attributes:
        engine: its connections. A transaction takes the write lock when it begins, except with
            `SNAPSHOT_OPTIONS`.
        where: its location, for messages.
    """

    def __init__(self, home: Home) -> None:
        self.home, self.where = home, str(home.database)
        url = URL.create("sqlite", database=str(home.database))  # the path may contain ? and %
        self.engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS})
        event.listen(self.engine, "connect", self._configure)
        event.listen(self.engine, "begin", self._begin)

    @staticmethod
    def _configure(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # `_begin` emits BEGIN
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @staticmethod
    def _begin(connection: Any) -> None:
        mode = connection.get_execution_options().get("begin", "IMMEDIATE")
        connection.exec_driver_sql(f"BEGIN {mode}")

    def schema(self, connection: Connection) -> int:
        """Return the version of its schema, from the file's header; 0 if it has no tables yet."""
        return int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())

    def set_schema(self, connection: Connection) -> None:
        """Record that the schema is the latest, in the caller's transaction."""
        connection.exec_driver_sql(f"PRAGMA user_version = {LATEST:d}")

    def protect(self, connection: Connection) -> None:
        """Make the database itself refuse to change or delete events."""
        for verb in ("update", "delete"):
            connection.exec_driver_sql(
                f"CREATE TRIGGER events_no_{verb} BEFORE {verb} ON events"
                " BEGIN SELECT RAISE(ABORT, 'append-only'); END"
            )

    def migrate(self, connection: Connection) -> str | None:
        """Copy the file and migrate it, in the caller's transaction; returns the name of the copy, if any.

        The transaction holds the write lock, so only one of several commands migrates an old database.

        Raises:
            RequestError: the database is newer than this program, or the copy cannot be written.
        """
        schema = self.schema(connection)
        if not OLDEST <= schema <= LATEST:
            raise RequestError(
                f"the state database has schema {schema};"
                f" this version of perilune supports {OLDEST} to {LATEST}",
                where=self.where,
                remedy="pip install --upgrade perilune, or choose another home with PERILUNE_HOME",
            )
        if schema == LATEST:
            return None
        backup = copy_database(self.home.database, schema)
        migrate(connection, schema)
        self.set_schema(connection)
        return backup.name

    def find_damage(self, connection: Connection) -> str:
        """Describe what SQLite's check of all pages and indexes finds; "" if there is no damage."""
        messages = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA integrity_check(3)")]
        return "" if messages == ["ok"] else "; ".join(messages)

    def translate_error(self, error: DatabaseError) -> PeriluneError:
        """Translate an error for the user, from SQLite's message and the free space on the disk."""
        message = str(error.orig)
        full = shutil.disk_usage(self.home.root).free < WAL_BYTES
        # SQLite may report a full disk as an I/O error.
        if "full" in message or ("disk I/O" in message and full):
            remedy = "free some space (perilune gc --yes), or choose another disk with PERILUNE_HOME"
            return RequestError("the disk is full; nothing was changed", where=self.where, remedy=remedy)
        if "disk I/O" in message and resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
            what = f"the file would exceed the file size limit of this process ({message})"
            return RequestError(what, where=self.where, remedy="raise `ulimit -f`")
        if "readonly" in message or "unable to open" in message:
            remedy = "make file and folder writable, or set PERILUNE_HOME to a copy of the home"
            what = f"cannot write the state database ({message})"
            return RequestError(what, where=self.where, remedy=remedy)
        if "not a database" in message or "malformed" in message:
            return DamagedError(
                f"the state database is damaged ({message})", where=self.where, remedy=REPAIR_REMEDY
            )
        if "locked" in message:
            return WorkFailedError(LOCKED_MESSAGE, where=self.where, remedy=LOCKED_REMEDY)
        return WorkFailedError(f"state database: {message}", where=self.where)


class Postgres:
    """A PostgreSQL schema named after the home, so that several homes can share a server.

    Args:
        schema: letters, digits and "_".
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
        with requires_extra("postgresql", "PostgreSQL needs a package", where=URL_VARIABLE):
            self.engine = create_engine(
                url.set(drivername="postgresql+psycopg"),
                connect_args={"connect_timeout": int(BUSY_SECONDS), "options": options},
                pool_pre_ping=True,
            )
        event.listen(self.engine, "begin", self._begin)

    def _begin(self, connection: Any) -> None:
        if connection.get_execution_options().get("begin") == "DEFERRED":
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        else:  # the transaction then sees everything committed before it got the lock
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({self._lock})")

    def check(self) -> None:
        """Connect once.

        Raises:
            PeriluneError: the server cannot be reached.
        """
        try:
            with self.engine.connect():
                pass
        except DatabaseError as error:
            raise self.translate_error(error) from error

    def schema(self, connection: Connection) -> int:
        """Return the version of the schema, which a table stores."""
        connection.exec_driver_sql(f'CREATE SCHEMA IF NOT EXISTS "{self._schema}"')
        connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS schema_version (number INTEGER NOT NULL)")
        return int(connection.exec_driver_sql("SELECT max(number) FROM schema_version").scalar_one() or 0)

    def set_schema(self, connection: Connection) -> None:
        """Record in a table that the schema is the latest."""
        connection.execute(text("INSERT INTO schema_version VALUES (:number)"), {"number": LATEST})

    def protect(self, connection: Connection) -> None:
        """Create a trigger."""
        connection.exec_driver_sql(
            "CREATE FUNCTION events_append_only() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'append-only'; END $$"
        )
        connection.exec_driver_sql(
            "CREATE TRIGGER events_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON events"
            " FOR EACH STATEMENT EXECUTE FUNCTION events_append_only()"
        )

    def migrate(self, connection: Connection) -> str | None:
        """Run the statements of each migration. Backups of the server are up to its administrator."""
        if (schema := self.schema(connection)) < LATEST:
            migrate(connection, schema)
            self.set_schema(connection)
        return None

    def find_damage(self, connection: Connection) -> str:
        """Read every row; the server then checks its pages if it keeps checksums."""
        listed = "SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema()"
        for (name,) in connection.exec_driver_sql(listed).all():
            for _ in connection.execute(select(text("*")).select_from(table(name))).partitions(10_000):
                pass
        return ""

    def translate_error(self, error: DatabaseError) -> PeriluneError:
        """Use the server's message."""
        message = str(error.orig).strip().partition("\n")[0]
        if "lock timeout" in message:
            return WorkFailedError(LOCKED_MESSAGE, where=self.where, remedy=LOCKED_REMEDY)
        if "No space left" in message or "disk full" in message:
            remedy = "free some space on the database server"
            return RequestError(
                "the database's disk is full; nothing was changed", where=self.where, remedy=remedy
            )
        if "connection" in message or "password" in message or "does not exist" in message:
            remedy = f"check the server and {URL_VARIABLE}; then run the command again"
            return WorkFailedError(
                f"cannot reach the state database ({message})", where=self.where, remedy=remedy
            )
        return WorkFailedError(f"state database: {message}", where=self.where)
