"""Back up a home while it is in use, and restore the backup as a new home.

The database in a backup is always SQLite, so backup and restore also move a home between SQLite and
PostgreSQL.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, insert, select, text
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import Session

from perilune.bundle.storage import new_folder
from perilune.control.machines.providers import CLUSTER_FILE, cluster_id
from perilune.control.record.database import SNAPSHOT_OPTIONS, Sqlite, open_database
from perilune.control.record.home import RESERVE_FILE, Home
from perilune.control.record.identity import ADOPTED_FILE, INHERITED_FILE, Inherited, inherit
from perilune.control.record.migrations import LATEST
from perilune.control.record.store import (
    Attempt,
    Base,
    Experiment,
    Machine,
    Run,
    Store,
    create_tables,
    record_event,
)
from perilune.control.record.transitions import Cleanup
from perilune.control.runs.current_submission import LIVE_STATES, end_submission
from perilune.errors import RequestError

# The entries of a home in a backup, beside the database.
BACKUP_ENTRIES = (
    "keys",
    "experiments",
    "sweeps",
    "templates",
    "providers.yaml",
    INHERITED_FILE,
    ADOPTED_FILE,
)
RUNS_FOLDER = "runs"
BATCH_ROWS = 10_000  # copied in one statement


def back_up(store: Store, home: Home, destination: Path, *, evidence: bool = False) -> None:
    """Copy the database, keys, recipes and templates to a new folder, completely or not at all.

    Args:
        evidence: also copy the bundle and the attempts of every run, as they are now.

    Raises:
        RequestError: `destination` exists, or it cannot be written.
    """
    with home.new_folder("make a backup", destination) as building:
        copy = Sqlite(Home(building))
        try:
            with store.snapshot() as session, copy.engine.begin() as written:
                create_tables(copy, written)
                _copy_tables(session.connection(), written)
        finally:
            copy.engine.dispose()
        cluster_id(home)  # creates it, so that the restored home knows whose runs it has inherited
        _copy_files(
            home.root, building, [*BACKUP_ENTRIES, CLUSTER_FILE, *([RUNS_FOLDER] if evidence else [])]
        )


def restore(backup: Path, home: Home) -> Inherited:
    """Create a new home from a backup. PERILUNE_DATABASE may choose its database.

    The home is built under a temporary name and renamed, so a kill leaves no home or a complete one. It gets
    a new name, and live runs still belong to the original home: see `perilune.control.record.identity`.

    Returns:
        The runs and machines that belong to the original home.

    Raises:
        RequestError: there is no backup, or the folder of the new home is not empty.
        WorkFailedError: the backup is damaged.
    """
    copy = Sqlite(Home(backup))
    if not copy.home.database.is_file():
        raise RequestError(
            "no backup here", where=str(backup), remedy="give a folder that `perilune backup` made"
        )
    try:
        _clear_new_home(home.root)
        with new_folder("restore", home.root) as building:
            return _fill_home(copy, Home(building))
    except DatabaseError as error:
        raise copy.translate_error(error) from error
    finally:
        copy.engine.dispose()


def _fill_home(copy: Sqlite, home: Home) -> Inherited:
    _copy_files(copy.home.root, home.root, (*BACKUP_ENTRIES, RUNS_FOLDER))
    with copy.engine.execution_options(**SNAPSHOT_OPTIONS).connect() as source:
        if copy.schema(source) != LATEST:
            raise RequestError(
                f"the backup has schema {copy.schema(source)}, this version has {LATEST}",
                where=str(copy.home.root),
                remedy="restore it with the version that made it, then upgrade",
            )
        unfinished = select(Run.id).where(Run.state.in_(LIVE_STATES))
        unclean = select(Attempt.run_id).where(Attempt.cleanup == Cleanup.PENDING.value)
        runs = {str(row[0]) for query in (unfinished, unclean) for row in source.execute(query)}
        machines = [str(key) for (key,) in source.execute(select(Machine.key))]
        others = inherit(copy.home, home, runs, machines)
        database = open_database(home)
        try:
            with database.engine.begin() as written:
                if database.schema(written):
                    raise RequestError(
                        "the database has tables already",
                        where=database.where,
                        remedy="name another database in PERILUNE_DATABASE, or unset it",
                    )
                create_tables(database, written)
                _copy_tables(source, written)
                with Session(written) as session:
                    for experiment in session.scalars(select(Experiment).where(Experiment.requested)):
                        end_submission(session, experiment, "restored")  # or both homes would continue it
                    record_event(
                        session, "store.restored", backup=copy.home.root.name, inherited=sorted(others.runs)
                    )
                    session.flush()
        finally:
            database.engine.dispose()
    return others


def _clear_new_home(root: Path) -> None:
    """Delete what opening a home creates (the reserve, empty folders); refuse a folder with anything else."""
    (root / RESERVE_FILE).unlink(missing_ok=True)
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        try:
            path.rmdir()
        except OSError:
            raise RequestError(
                f"the folder is not empty: it contains {path.name}",
                where=str(root),
                remedy="restore to a folder that does not exist: PERILUNE_HOME=NEW perilune restore",
            ) from None


def _copy_tables(source: Connection, target: Connection) -> None:
    """Copy all rows of all tables, parents before the rows that reference them."""
    for table in Base.metadata.sorted_tables:
        for rows in _read_batches(source, table):
            target.execute(insert(table), rows)
    if target.dialect.name == "postgresql":
        highest = "coalesce((SELECT max(seq) FROM events), 0) + 1"
        target.execute(text(f"SELECT setval(pg_get_serial_sequence('events', 'seq'), {highest}, false)"))


def _read_batches(source: Connection, table: Table) -> Iterable[list[dict[str, Any]]]:
    order = [*table.primary_key.columns]
    if table.name == "runs":  # a retry refers to an earlier run
        order = [table.c.created, *order]
    result = source.execution_options(yield_per=BATCH_ROWS).execute(select(table).order_by(*order))
    for part in result.mappings().partitions():
        yield [dict(row) for row in part]


def _copy_folder(source: Path, target: Path) -> None:
    """Copy a folder, except partial files and files that a live run deletes meanwhile."""
    partial = shutil.ignore_patterns("*.tmp")
    try:
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=partial)
    except shutil.Error as error:
        for path, _, why in error.args[0]:
            if os.path.lexists(path):
                raise RequestError(f"cannot be copied: {why}", where=os.fspath(path)) from None


def _copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    for name in names:
        path = source / name
        if path.is_dir():
            _copy_folder(path, target / name)
        elif path.is_file():
            shutil.copy2(path, target / name)
