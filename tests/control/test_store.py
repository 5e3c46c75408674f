"""The store is durable and atomic, and detects edits of its events."""

import resource
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import select, text

from perilune.control.record.home import Home
from perilune.control.record.store import Event, Experiment, Store, record_event, verify_events
from perilune.control.runs.experiments import Control
from perilune.errors import PeriluneError, RequestError, WorkFailedError


def test_sqlite_settings_are_durable(control: Control) -> None:
    with control.store.snapshot() as session:
        settings = {
            name: session.scalar(text(f"PRAGMA {name}"))
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert settings == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


def test_path_of_a_home_may_contain_characters_of_urls(tmp_path: Path) -> None:
    home = Home(tmp_path / "50%20 of me?x=1#y")
    home.root.mkdir()
    Store(home)
    assert home.database.is_file() and [path.name for path in tmp_path.iterdir()] == [home.root.name]


def test_transaction_is_atomic(control: Control) -> None:
    with pytest.raises(KeyError), control.store.transaction() as session:
        session.add(Experiment(id="e", name="n", recipe_digest="d", created=0.0, used=0.0))
        record_event(session, "experiment.created", experiment="e")
        session.flush()
        raise KeyError
    with control.store.snapshot() as session:
        assert session.get(Experiment, "e") is None
        assert session.scalars(select(Event)).all() == []


def test_reader_does_not_wait_for_writer(control: Control) -> None:
    with control.store.transaction() as writer:
        record_event(writer, "first")
        with control.store.snapshot() as reader:
            assert reader.scalars(select(Event)).all() == []


def test_events_are_append_only(control: Control) -> None:
    with control.store.transaction() as session:
        record_event(session, "first")
    for statement in ("UPDATE events SET kind = 'other'", "DELETE FROM events"):
        with pytest.raises(WorkFailedError, match="append-only"), control.store.transaction() as session:
            session.execute(text(statement))


@pytest.mark.parametrize(
    "tampering", ["UPDATE events SET time = 1 WHERE seq = 2", "DELETE FROM events WHERE seq = 2"]
)
def test_tampering_with_database_is_detected(control: Control, tampering: str) -> None:
    with control.store.transaction() as session:
        for kind in ("first", "second", "third"):
            record_event(session, kind, run_id=None, detail={"n": 1})
    with control.store.snapshot() as session:
        assert verify_events(session) is None
    raw = sqlite3.connect(control.home.database)
    for verb in ("update", "delete"):
        raw.execute(f"DROP TRIGGER events_no_{verb}")
    raw.execute(tampering)
    raw.commit()
    raw.close()
    with control.store.snapshot() as session:
        assert verify_events(session) in {2, 3}


def refused(home: Home) -> PeriluneError:
    with pytest.raises(PeriluneError) as caught:
        Store(home)
    return caught.value


def test_damaged_database_is_reported(tmp_path: Path) -> None:
    home = Home.open(tmp_path)
    home.database.write_bytes(b"this is not SQLite" * 100)
    assert "damaged" in refused(home).what


def test_file_size_limit_is_reported(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        error = refused(Home.open(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(error, RequestError) and "ulimit -f" in error.remedy


def test_unwritable_home_is_request_error() -> None:
    with pytest.raises(RequestError) as caught:
        Home.open(Path("/proc/perilune"))
    assert caught.value.where == "/proc/perilune" and "PERILUNE_HOME" in caught.value.remedy
    with pytest.raises(RequestError):
        Home.open(Path("/dev/null"))
