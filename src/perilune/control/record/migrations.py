"""Migrate the database of an older version in place, one schema version at a time.

Migrations are plain statements rather than Alembic scripts. SQLite stores the schema version in the file and
changes tables inside a transaction, so a migration happens completely or not at all, and every command starts
fast because nothing needs to be imported.

Rules for a new entry: it only adds (a new column has a default in the database, because a command of the
previous version may still be following a run), and it never touches `events`, whose hashes cover them.
"""

import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import Connection

from perilune.bundle.storage import storage_errors
from perilune.files import fsync_directory

# Schema version to the statements that lead to it from the version before.
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
    6: (
        """CREATE TABLE earlier_uses (
            machine_key VARCHAR NOT NULL REFERENCES machines ("key"), run_id VARCHAR NOT NULL,
            epoch INTEGER NOT NULL, cost DOUBLE NOT NULL, PRIMARY KEY (machine_key, run_id, epoch))""",
        "CREATE INDEX ix_earlier_uses_run_id ON earlier_uses (run_id)",
    ),
}
OLDEST = min(MIGRATIONS) - 1
LATEST = max(MIGRATIONS)


def migrate(connection: Connection, schema: int) -> None:
    """Run the statements that lead from a schema to the latest, in the caller's transaction."""
    for number in range(schema + 1, LATEST + 1):
        for statement in MIGRATIONS[number]:
            connection.exec_driver_sql(statement)


def copy_database(database: Path, schema: int) -> Path:
    """Copy the committed content of `database` to a file beside it, completely or not at all."""
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
