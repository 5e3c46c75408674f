"""Backup and restore: during writes, into a new home, and into another kind of database."""

import json
import shlex
import shutil
import threading
from pathlib import Path

import pytest
from drill_cases import Command, carry_out, drill_control, drill_plan
from postgres_server import binaries, server
from sqlalchemy import text

from perilune.bundle.envelope import PUBLIC
from perilune.control.record.backup import back_up, restore
from perilune.control.record.database import URL_VARIABLE, Postgres
from perilune.control.record.home import Home
from perilune.control.record.store import record_event, verify_events
from perilune.control.runs.experiments import Control
from perilune.control.runs.progress import StageFinished, StageReused


def test_restore_recreates_home_from_backup(
    perilune: Command, control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = drill_plan("one", steps=1)
    carry_out(control, plan)
    friday = str(tmp_path / "last friday")
    code, out, _ = perilune("backup", friday, "--evidence")
    assert code == 0 and shlex.split(out.partition("restore it: ")[2])[1:] == ["perilune", "restore", friday]
    assert perilune("backup", friday)[0] == 2
    assert perilune("restore", friday)[0] == 2  # this home has a record
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path / "new"))
    assert perilune("restore", str(tmp_path / "nothing"))[0] == 2
    assert perilune("restore", friday)[0] == 0
    assert perilune("verify")[0] == 0 and perilune("verify", "one")[0] == 0
    new = drill_control(tmp_path / "new")
    assert isinstance(carry_out(new, plan)[0], StageReused)
    assert isinstance(carry_out(new, drill_plan("two", steps=1))[-1], StageFinished)
    assert (new.home.keys / PUBLIC).read_bytes() == (control.home.keys / PUBLIC).read_bytes()
    assert (new.home.keys / "controller.key").stat().st_mode & 0o777 == 0o600
    new.store.close()


def test_home_restored_without_evidence_reports_the_missing_files_of_every_run(
    perilune: Command, control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, event = carry_out(control, drill_plan("one", steps=1), drill_plan("two", steps=1))
    assert perilune("backup", str(tmp_path / "small"))[0] == 0
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path / "new"))
    assert perilune("restore", str(tmp_path / "small"))[0] == 0
    code, out, _ = perilune("verify")
    assert code == 1 and out.count(": the files of the run are missing\n") == 2
    for command in (("bundle", "verify"), ("reproduce",)):
        code, _, err = perilune(*command, event.run_id)
        assert code == 2 and "the files of the run are missing" in err and "backup --evidence" in err
    code, out, _ = perilune("explain", event.run_id)
    assert f"perilune verify {event.run_id}" in out and "reproduce" not in out


def test_backup_leaves_out_what_a_live_run_removes_meanwhile(
    perilune: Command, control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, event = carry_out(control, drill_plan("one", steps=1))
    old = control.home.attempt(event.run_id, 1) / "old"
    old.mkdir()
    (old / "weights").touch()
    (old / "moments").touch()
    copy = shutil.copyfile

    def copy_late(source: str, target: str, **options: bool) -> object:
        if Path(source).parent == old:
            shutil.rmtree(old, ignore_errors=True)
        return copy(source, target, **options)

    monkeypatch.setattr(shutil, "copyfile", copy_late)
    code, _, err = perilune("backup", str(tmp_path / "friday"), "--evidence")
    assert code == 0, err
    assert (tmp_path / "friday" / "runs" / event.run_id / "bundle" / "job.json").exists()


def test_damaged_backup_is_reported(
    perilune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert perilune("backup", str(tmp_path / "friday"))[0] == 0
    (tmp_path / "friday" / "state.db").write_bytes(b"no database" * 1000)
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path / "new"))
    code, _, err = perilune("restore", str(tmp_path / "friday"))
    assert code == 1 and f"{tmp_path / 'friday' / 'state.db'}: the state database is damaged" in err


def test_backup_during_writes_is_consistent(control: Control, tmp_path: Path) -> None:
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            with control.store.transaction() as session:
                record_event(session, "drill")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(3):
            back_up(control.store, control.home, tmp_path / str(number))
    finally:
        stop.set()
        writer.join()
    for number in range(3):
        restore(tmp_path / str(number), Home.open(tmp_path / f"home-{number}"))
        copy = drill_control(tmp_path / f"home-{number}")
        with copy.store.snapshot() as session:
            assert verify_events(session) is None
        copy.store.close()


def test_home_moves_to_postgresql_and_back(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if binaries() is None:
        pytest.skip("no PostgreSQL server: apt-get install postgresql")
    plan = drill_plan("one", steps=1)
    carry_out(control, plan)
    back_up(control.store, control.home, tmp_path / "backup", evidence=True)
    with server() as url, monkeypatch.context() as there:
        there.setenv(URL_VARIABLE, url)
        restore(tmp_path / "backup", Home.open(tmp_path / "server"))
        moved = drill_control(tmp_path / "server")
        assert isinstance(moved.store.database, Postgres)
        assert isinstance(carry_out(moved, plan)[0], StageReused)
        assert isinstance(carry_out(moved, drill_plan("two", steps=1))[-1], StageFinished)
        with moved.store.snapshot() as session:
            assert verify_events(session) is None
        back_up(moved.store, moved.home, tmp_path / "again", evidence=True)
        moved.store.close()
    restore(tmp_path / "again", Home.open(tmp_path / "back"))
    back = drill_control(tmp_path / "back")
    assert isinstance(carry_out(back, drill_plan("two", steps=1))[0], StageReused)
    with back.store.snapshot() as session:
        assert verify_events(session) is None
        kinds = set(session.scalars(text("SELECT kind FROM events")))
    assert json.dumps(sorted(kinds)).count("store.restored") == 1
    back.store.close()
