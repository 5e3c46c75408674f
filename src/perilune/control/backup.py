"""A copy of all that a home remembers, made while it is in use, and put back elsewhere.

The copy's database is SQLite whatever the home's is, so that restoring also moves a home between the two.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, insert, select, text

from perilune.bundle.storage import new_folder, storage_errors
from perilune.control.database import DEFERRED, Database, Sqlite, database_of
from perilune.control.home import Home
from perilune.control.migrations import LATEST
from perilune.control.store import Base, Store, record
from perilune.errors import RequestError

SMALL = ("keys", "experiments", "templates", "cluster", "providers.yaml")  # beside the database
EVIDENCE = "runs"
ROWS = 10_000  # copied at once


def back_up(store: Store, home: Home, destination: Path, *, evidence: bool = False) -> None:
    """Copy the record, the keys, recipes and templates to a new folder; it is there whole or not at all.

    Args:
        evidence: also copy every run's bundle and attempts, as they are at that moment.

    Raises:
        RequestError: when something is at `destination`, or it cannot be written.
    """
    with new_folder("make a backup", destination) as building:
        copy = Sqlite(Home(building))
        try:
            with store.snapshot() as session, copy.engine.begin() as written:
                _lay_out(copy, written)
                _copy(session.connection(), written)
        finally:
            copy.engine.dispose()
        _files(home.root, building, [*SMALL, EVIDENCE] if evidence else SMALL)


def restore(backup: Path, home: Home) -> None:
    """Make a home what it was when `backup` was made; its database is where PERILUNE_DATABASE says.

    What was begun since then, reconciling finds and ends: machines by their tag, attempts by their files.

    Raises:
        RequestError: when there is no backup, or the home has a record already.
    """
    copy = Sqlite(Home(backup))
    if not copy.home.database.is_file():
        raise RequestError(
            "no backup here", where=str(backup), remedy="give a folder that `perilune backup` made"
        )
    if home.database.exists() or (home.root / "database").exists():
        raise RequestError(
            "this home has a record already",
            where=str(home.root),
            remedy="restore to a new home: PERILUNE_HOME=NEW perilune restore",
        )
    with storage_errors("restore", home.root):
        present = [name for name in (*SMALL, EVIDENCE) if (backup / name).exists()]
        _files(backup, home.root, present)
        database = database_of(home)
        try:
            with (
                copy.engine.execution_options(**DEFERRED).connect() as source,
                database.engine.begin() as written,
            ):
                if copy.schema(source) != LATEST:
                    raise RequestError(
                        f"the backup has schema {copy.schema(source)}, this version has {LATEST}",
                        where=str(backup),
                        remedy="restore it with the version that made it, then upgrade",
                    )
                _lay_out(database, written)
                _copy(source, written)
        finally:
            copy.engine.dispose()
            database.engine.dispose()
    store = Store(home)
    with store.transaction() as session:
        record(session, "store.restored", backup=backup.name)
    store.close()


def _lay_out(database: Database, connection: Connection) -> None:
    """Make the tables in an empty database."""
    if database.schema(connection):
        raise RequestError("the database has tables already", where=database.where)
    Base.metadata.create_all(connection)
    database.protect(connection)
    database.set_schema(connection, LATEST)


def _copy(source: Connection, target: Connection) -> None:
    """Copy all rows of all tables, in an order in which references hold."""
    for table in Base.metadata.sorted_tables:
        for rows in _in_parts(source, table):
            target.execute(insert(table), rows)
    if target.dialect.name == "postgresql":
        highest = "coalesce((SELECT max(seq) FROM events), 0) + 1"
        target.execute(text(f"SELECT setval(pg_get_serial_sequence('events', 'seq'), {highest}, false)"))


def _in_parts(source: Connection, table: Table) -> Iterable[list[dict[str, Any]]]:
    order = [*table.primary_key.columns]
    if table.name == "runs":  # a retry refers to an earlier run
        order = [table.c.created, *order]
    found = source.execution_options(yield_per=ROWS).execute(select(table).order_by(*order))
    for part in found.mappings().partitions():
        yield [dict(row) for row in part]


def _files(source: Path, target: Path, names: Iterable[str]) -> None:
    for name in names:
        path = source / name
        if path.is_dir():
            shutil.copytree(path, target / name, symlinks=True, dirs_exist_ok=True, ignore=_being_made)
        elif path.is_file():
            shutil.copy2(path, target / name)


def _being_made(_: str, names: list[str]) -> set[str]:
    return {name for name in names if name.endswith(".tmp")}
