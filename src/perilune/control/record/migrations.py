"""Bringing the database of an older version forward, in place, one schema at a time.

A list of statements rather than Alembic: SQLite keeps the schema's number in the file itself and changes
tables inside a transaction, so a migration is done wholly or not at all with no table, folder of scripts or
configuration beside it, and importing nothing keeps every command quick.

Rules for a new entry: it only adds (a new column has a default in the database, because a command of the
version before may still be following a run), and it never touches `events`, whose hashes cover them.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import Connection

from perilune.bundle.storage import storage_errors
from perilune.errors import RequestError
from perilune.files import fsync_directory

# The statements that lead to a schema from the one before it.
MIGRATIONS: dict[int, tuple[str, ...]] = {
    2: ("ALTER TABLE runs ADD COLUMN forced BOOLEAN NOT NULL DEFAULT 0",),
    3: (
        """CREATE TABLE machines (
            "key" VARCHAR NOT NULL, provider VARCHAR NOT NULL, run_id VARCHAR NOT NULL,
            epoch INTEGER NOT NULL, rank INTEGER NOT NULL, state VARCHAR NOT NULL, reason VARCHAR NOT NULL,
            kind VARCHAR NOT NULL, price DOUBLE NOT NULL, lease JSON NOT NULL, remote_id VARCHAR NOT NULL,
            leased JSON NOT NULL, asked JSON, refused VARCHAR NOT NULL, notice BOOLEAN NOT NULL,
            idle_since JSON, missing_since JSON, unseen_since JSON, terminate_calls INTEGER NOT NULL,
            cost DOUBLE NOT NULL, created DOUBLE NOT NULL, ended DOUBLE, PRIMARY KEY ("key"))""",
        "CREATE INDEX ix_machines_run_id ON machines (run_id)",
    ),
    4: (
        "ALTER TABLE experiments ADD COLUMN wanted BOOLEAN NOT NULL DEFAULT FALSE",
        "ALTER TABLE experiments ADD COLUMN wish INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE experiments ADD COLUMN template JSON",
        "ALTER TABLE stages ADD COLUMN wish INTEGER NOT NULL DEFAULT 0",
    ),
    5: (
        """CREATE TABLE conditions (
            run_id VARCHAR NOT NULL, about VARCHAR NOT NULL, message VARCHAR NOT NULL,
            since FLOAT NOT NULL, PRIMARY KEY (run_id, about))""",
    ),
}
OLDEST = min(MIGRATIONS) - 1
LATEST = max(MIGRATIONS)


def schema_of(connection: Connection) -> int:
    """Number of the schema that the database has; 0 when it has none yet."""
    return int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())


def set_schema(connection: Connection, number: int) -> None:
    """Write down, in the caller's transaction, which schema the database has now."""
    connection.exec_driver_sql(f"PRAGMA user_version = {number:d}")


def migrate(connection: Connection, database: Path) -> Path | None:
    """Bring `database` to the latest schema, in the caller's transaction; returns the copy made before.

    The caller's transaction holds the write lock, so of two commands that find an old database one migrates
    it and the other finds it done.

    Raises:
        RequestError: when the database is newer than this program, or the copy cannot be written.
    """
    found = schema_of(connection)
    if not OLDEST <= found <= LATEST:
        raise RequestError(
            f"the state database has schema {found}, and this version of perilune knows {OLDEST} to {LATEST}",
            where=str(database),
            remedy="pip install --upgrade perilune, or choose another home with PERILUNE_HOME",
        )
    if found == LATEST:
        return None
    backup = back_up(database, found)
    for number in range(found + 1, LATEST + 1):
        for statement in MIGRATIONS[number]:
            connection.exec_driver_sql(statement)
    set_schema(connection, LATEST)
    return backup


def back_up(database: Path, schema: int) -> Path:
    """Copy what is committed in `database` to a file beside it, whole or not at all; returns that file."""
    backup = database.with_name(f"{database.stem}.schema-{schema}{database.suffix}")
    temporary = backup.with_name(f".{backup.name}.{os.getpid()}.tmp")
    with storage_errors("copy the state database before changing it", backup):
        try:
            with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(temporary)) as copy:
                source.backup(copy)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(backup)
        except sqlite3.Error as error:
            full = "full" in str(error) or "disk I/O" in str(error)
            raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(backup)) from error
        finally:
            temporary.unlink(missing_ok=True)
        fsync_directory(backup.parent)
    return backup
