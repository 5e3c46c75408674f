"""The store on a real PostgreSQL server."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from drill_cases import Command, carry_out, drill_control, drill_plan
from postgres_server import binaries, server
from sqlalchemy import text
from sqlalchemy.exc import DatabaseError

from perilune.control.record.database import URL_VARIABLE, Postgres, open_database
from perilune.control.record.home import Home
from perilune.control.record.store import Store, record_event, verify_events
from perilune.control.runs.experiments import Control
from perilune.control.runs.progress import StageFailed, StageFinished, StageReused
from perilune.errors import RequestError, WorkFailedError


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    if binaries() is None:
        pytest.skip("no PostgreSQL server: apt-get install postgresql")
    with server() as found:
        yield found


@pytest.fixture
def control(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(URL_VARIABLE, url)
    opened = drill_control(tmp_path / "home")
    yield opened
    opened.store.close()


def test_runs_and_commands_work_on_postgresql(control: Control, perilune: Command) -> None:
    assert isinstance(control.store.database, Postgres) and not control.home.database.exists()
    plans = [drill_plan("one", steps=1), drill_plan("two", fail_at=0, how="work")]
    events = carry_out(control, *plans)
    assert {type(event) for event in events} >= {StageFinished, StageFailed}
    assert isinstance(carry_out(control, plans[0])[0], StageReused)
    assert "one" in perilune("runs")[1] and perilune("verify", "one")[0] == 0
    assert perilune("reconcile")[0] == 0
    with control.store.snapshot() as session:
        assert verify_events(session) is None


def test_events_are_append_only(control: Control) -> None:
    carry_out(control, drill_plan("one", steps=1))
    for statement in ("UPDATE events SET detail = '{}'", "DELETE FROM events", "TRUNCATE events"):
        with pytest.raises(DatabaseError, match="append-only"), control.store.engine.begin() as connection:
            connection.execute(text(statement))


def test_concurrent_writers_lose_no_event(control: Control) -> None:
    def write(number: int) -> None:
        for _ in range(10):
            with control.store.transaction() as session:
                record_event(session, "drill", writer=number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with control.store.snapshot() as session:
        assert verify_events(session) is None
        assert session.scalar(text("SELECT count(*) FROM events WHERE kind = 'drill'")) == 60


def test_snapshot_is_consistent_and_takes_no_lock(control: Control) -> None:
    with control.store.snapshot() as session:
        before = session.scalar(text("SELECT count(*) FROM events"))
        with control.store.transaction() as other:
            other.execute(text("SET LOCAL lock_timeout = '10s'"))  # waiting for a lock is an error
            record_event(other, "drill")
        assert session.scalar(text("SELECT count(*) FROM events")) == before


def test_homes_are_isolated(control: Control, tmp_path: Path) -> None:
    carry_out(control, drill_plan("one", steps=1))
    other = drill_control(tmp_path / "other")
    with other.store.snapshot() as session:
        assert session.scalar(text("SELECT count(*) FROM runs")) == 0
    other.store.close()


def test_home_keeps_its_database(control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URL_VARIABLE)
    assert isinstance(open_database(control.home), Postgres)  # remembered
    monkeypatch.setenv(URL_VARIABLE, "postgresql://elsewhere/other")
    with pytest.raises(RequestError, match="the state of this home is in"):
        open_database(control.home)
    monkeypatch.delenv(URL_VARIABLE)
    plain = Home.open(tmp_path / "plain")
    Store(plain).close()
    monkeypatch.setenv(URL_VARIABLE, "postgresql://elsewhere/other")
    with pytest.raises(RequestError, match=r"is in .*state\.db"):
        open_database(plain)


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("postgresql://me:secret@host/db", "contains a password"),
        ("postgresql://me@host/db?password=secret", "contains a password"),
        ("mysql://host/db", "mysql is not supported"),
        ("nonsense", "not a database URL"),
    ],
)
def test_invalid_database_url_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, what: str
) -> None:
    monkeypatch.setenv(URL_VARIABLE, url)
    with pytest.raises(RequestError, match=what) as found:
        open_database(Home.open(tmp_path / "home"))
    assert "secret" not in str(found.value)
    assert not (tmp_path / "home" / "database").exists()


def test_unreachable_server_is_reported_and_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URL_VARIABLE, f"postgresql://perilune@/postgres?host={tmp_path}")
    with pytest.raises(WorkFailedError, match="cannot reach the state database"):
        Store(Home.open(tmp_path / "home"))
    assert not (tmp_path / "home" / "database").exists()
