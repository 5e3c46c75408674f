"""A home of an older version is migrated completely or not at all; a home of a newer version is refused."""

import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import select

from perilune.control.queries.lookup import find_run, latest_experiments, stage_statuses
from perilune.control.record import database, migrations
from perilune.control.record.home import Home
from perilune.control.record.migrations import LATEST, MIGRATIONS
from perilune.control.record.store import Event, Store, verify_events
from perilune.control.runs.experiments import Control
from perilune.errors import RequestError, WorkFailedError

FIRST = (Path(__file__).parent / "schema_1.sql").read_text()


@pytest.fixture
def old(tmp_path: Path) -> Home:
    """A home whose database has the first schema."""
    home = Home.open(tmp_path / "old")
    with closing(sqlite3.connect(home.database)) as raw:
        raw.execute("PRAGMA journal_mode=WAL")
        raw.executescript(FIRST)
    return home


def rows(database: Path, table: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(database)) as raw:
        return raw.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall()


def number(database: Path) -> int:
    with closing(sqlite3.connect(database)) as raw:
        return int(raw.execute("PRAGMA user_version").fetchone()[0])


def test_migration_keeps_all_data_of_old_home(old: Home) -> None:
    before = {table: rows(old.database, table) for table in ("runs", "attempts", "events", "stages")}
    control = Control(old)

    assert number(old.database) == LATEST
    assert [row[: len(before["runs"][0])] for row in rows(old.database, "runs")] == before["runs"]
    assert rows(old.database, "attempts") == before["attempts"]
    assert [(stage.name, stage.state) for stage in stage_statuses(control, latest_experiments(control))] == [
        ("drill", "succeeded"),
        ("drill", "failed"),
    ]
    assert not find_run(control, "drills/drill").forced
    with control.store.snapshot() as session:
        kinds = list(session.scalars(select(Event.kind).order_by(Event.seq)))
        assert verify_events(session) is None
    assert len(kinds) == len(before["events"]) + 1 and kinds[-1] == "store.migrated"

    copy = old.root / "state.schema-1.db"
    assert number(copy) == 1
    assert {table: rows(copy, table) for table in before} == before
    Store(old)  # a second open migrates nothing
    with control.store.snapshot() as session:
        assert len(list(session.scalars(select(Event.seq)))) == len(kinds)


def test_migrated_database_has_the_schema_of_a_new_one(old: Home, tmp_path: Path) -> None:
    new = Home.open(tmp_path / "new")

    def shape(home: Home) -> dict[str, list[tuple[object, ...]]]:
        Store(home).close()
        with closing(sqlite3.connect(home.database)) as raw:
            names = raw.execute(
                "SELECT name, type, tbl_name FROM sqlite_master WHERE sql NOT NULL"
            ).fetchall()
            tables = [name for name, kind, _ in names if kind == "table"]
            found = {name: raw.execute(f"PRAGMA table_info({name})").fetchall() for name in tables}
        # The order of columns differs: SQLite adds new columns at the end.
        columns = {name: sorted(column[1:] for column in table) for name, table in found.items()}
        return columns | {"": sorted(names)}

    assert shape(old) == shape(new)


def test_concurrent_commands_migrate_once(old: Home) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: Store(old).close(), range(4)))
    kinds = [row[4] for row in rows(old.database, "events")]
    assert kinds.count("store.migrated") == 1


def test_failed_migration_changes_nothing(old: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rows(old.database, "runs")
    monkeypatch.setitem(MIGRATIONS, LATEST, (*MIGRATIONS[LATEST], "ALTER TABLE nowhere ADD COLUMN x"))
    with pytest.raises(WorkFailedError, match="nowhere"):
        Store(old)
    assert number(old.database) == 1 and rows(old.database, "runs") == before


def full(database: Path, schema: int) -> Path:
    raise RequestError("the disk is full", where=str(database))


def test_migration_stops_when_backup_copy_fails(old: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "copy_database", full)
    with pytest.raises(RequestError, match="full"):
        Store(old)
    assert number(old.database) == 1


def test_full_disk_during_backup_copy_is_reported(old: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect

    class Full(sqlite3.Connection):
        def backup(self, *_: object, **__: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(migrations.sqlite3, "connect", lambda path: connect(path, factory=Full))
    with pytest.raises(RequestError, match="the disk is full"):
        migrations.copy_database(old.database, 1)
    assert sorted(path.name for path in old.root.glob("*.db")) == ["state.db"]


@pytest.mark.parametrize("schema", [LATEST + 1, 99])
def test_newer_home_is_refused_unchanged(old: Home, schema: int) -> None:
    with closing(sqlite3.connect(old.database)) as raw:
        raw.execute(f"PRAGMA user_version = {schema}")
    before = old.database.read_bytes()
    with pytest.raises(RequestError) as caught:
        Store(old)
    assert f"schema {schema}" in caught.value.what and "upgrade" in caught.value.remedy
    assert old.database.read_bytes() == before and not list(old.root.glob("state.schema*"))
