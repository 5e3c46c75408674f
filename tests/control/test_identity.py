"""A restored home is a separate home: it acts on no run or machine of the original until `perilune adopt`."""

import os
import signal
import sys
from pathlib import Path

import pytest
from cloud_cases import bill, rent_from, rented, tend_until
from cloud_fixtures import *  # noqa: F403
from drill_cases import Command, carry_out, drill_control, drill_plan, hanging, worker_of
from sqlalchemy import func, select

from perilune.control.machines.lifecycle import Fleet
from perilune.control.machines.panic import panic
from perilune.control.machines.sweep import terminate_unrecorded
from perilune.control.record.backup import back_up, restore
from perilune.control.record.home import Home
from perilune.control.record.identity import adopt, read_inherited
from perilune.control.record.store import Event, Store, verify_events
from perilune.control.record.transitions import MachineState
from perilune.control.runs.experiments import Control
from perilune.control.runs.progress import StageFinished
from perilune.control.runs.requests import request_cancel
from perilune.errors import RequestError
from perilune.execution.hosts.local import LocalHost
from perilune.execution.limits import AttemptLimits
from perilune.execution.placements.remote import RemotePlacement, Site
from perilune.execution.processes import ProcessIdentity
from perilune.execution.providers.fake.client import FakeCloud


def is_alive(pid: int) -> bool:
    return ProcessIdentity.of(pid) is not None  # a zombie counts as dead


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_restored_home_leaves_runs_of_original_alone_until_adoption(
    control: Control, perilune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    placement = control.reconciler.placements.local
    if where == "elsewhere":
        site = Site(python=sys.executable, installed=True, workspace=str(tmp_path / "there"))
        placement = RemotePlacement(LocalHost(), site, AttemptLimits())
        monkeypatch.setattr(control.reconciler.placements, "local", placement)
    events, attempt = hanging(control)
    run_id, worker = attempt.parents[1].name, worker_of(attempt)
    assert perilune("backup", str(tmp_path / "backup"), "--evidence")[0] == 0
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path / "copy"))
    if where == "elsewhere":
        monkeypatch.setattr("perilune.control.runs.placements.LocalPlacement", lambda: placement)
    code, out, _ = perilune("restore", str(tmp_path / "backup"))
    assert code == 0 and "the original home keeps 1 live run" in out and "perilune adopt" in out
    name = (control.home.root / "cluster").read_text()
    assert (tmp_path / "copy" / "cluster").read_text() != name
    for words in (
        ("cancel", run_id),
        ("cancel", run_id, "--force"),
        ("wait", run_id),
        ("logs", run_id, "-f"),
    ):
        code, _, err = perilune(*words)
        assert code == 2 and f"belongs to another home ({name})" in err and "perilune adopt" in err
    for words in (("reconcile",), ("runs",), ("show", run_id), ("explain", run_id)):
        code, out, err = perilune(*words)
        assert code == 0, err
    assert f"belongs to the home {name}" in out and "perilune adopt" in out
    copy = drill_control(tmp_path / "copy")
    again = carry_out(copy, drill_plan(steps=4, fail_at=2, how="hang", fresh_only=True))
    assert isinstance(again[-1], StageFinished) and again[-1].run_id != run_id  # a run of the copy
    assert is_alive(worker) and copy.run(run_id).state == "active"
    assert perilune("adopt")[0] == 0 and perilune("adopt")[0] == 2
    assert perilune("cancel", run_id)[0] == 0
    assert not is_alive(worker)
    copy.store.close()
    events.close()  # type: ignore[attr-defined]


def test_restored_home_leaves_machines_of_original_alone_until_adoption(
    control: Control, fleet: Fleet, cloud: FakeCloud, tmp_path: Path
) -> None:
    key = rented(control, fleet)
    tend_until(fleet, key, MachineState.READY)
    back_up(control.store, control.home, tmp_path / "backup")
    home = Home(tmp_path / "copy")
    assert restore(tmp_path / "backup", home).runs == {"01RUN"}
    copy = drill_control(home.root)
    rent_from(home.root, cloud.folder)
    other = Fleet(copy.home, copy.store)
    other.reconcile_all()
    assert terminate_unrecorded(other, grace=0.0) == [] and other.machines() == []
    with pytest.raises(RequestError, match="another home rented this machine"):
        other.request_termination(key, "not ours")
    assert panic(home, patience=5.0).ended == ()
    found = other.machine(key)
    assert found is not None and found.state == MachineState.READY and bill(cloud)["alive"] == [key]
    assert adopt(home, copy.store).runs == {"01RUN"}
    other = Fleet(copy.home, copy.store)
    other.request_termination(key, "the original is gone")
    tend_until(other, key, MachineState.GONE)
    assert bill(cloud)["alive"] == []
    copy.store.close()


def test_copy_of_copy_names_both_homes_and_executes_none_of_their_requests(
    control: Control, tmp_path: Path
) -> None:
    events, attempt = hanging(control)
    request_cancel(control, attempt.parents[1].name)
    back_up(control.store, control.home, tmp_path / "first", evidence=True)
    first = Home(tmp_path / "copy")
    restore(tmp_path / "first", first)
    copy = drill_control(first.root)
    assert [run.state for run in copy.reconciler.reconcile_all()] == ["active"] and is_alive(
        worker_of(attempt)
    )
    back_up(copy.store, first, tmp_path / "second")
    copy.store.close()
    report = restore(tmp_path / "second", Home(tmp_path / "again"))
    names = tuple((home.root / "cluster").read_text() for home in (first, control.home))
    assert report.homes == names and report.runs == {attempt.parents[1].name}
    os.kill(worker_of(attempt), signal.SIGKILL)
    events.close()  # type: ignore[attr-defined]


@pytest.mark.thorough
def test_killed_restore_leaves_all_or_nothing(control: Control, tmp_path: Path) -> None:
    carry_out(control, drill_plan("one", steps=1))
    back_up(control.store, control.home, tmp_path / "backup", evidence=True)
    home = Home(tmp_path / "new")

    def killed_at(instant: int) -> bool:
        """Restore in a process that kills itself at its n-th audited operation; whether it was killed."""
        child = os.fork()
        if child == 0:
            count = 0

            def hook(event: str, _: object) -> None:
                nonlocal count
                if event.split(".", maxsplit=1)[0] in {"open", "os", "shutil", "sqlite3"}:
                    count += 1
                    if count == instant:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            try:
                restore(tmp_path / "backup", home)
            finally:
                os._exit(0)
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])

    last, wholes = 1, 0
    while killed_at(last):
        if home.database.exists():  # then complete: the record, the artifacts and a name of its own
            wholes += 1
            store = Store(home)
            with store.snapshot() as session:
                assert verify_events(session) is None
                kinds = session.scalars(select(Event.kind)).all()
                assert kinds[-1] == "store.restored" and session.scalar(select(func.count(Event.seq)))
            store.close()
            assert {path.name for path in home.runs.iterdir()} == {
                path.name for path in control.home.runs.iterdir()
            }
            assert (home.root / "inherited.json").exists()
            home.root.rename(tmp_path / f"whole-{last}")
        else:
            assert not home.root.exists()
        last += 1 + last // 8
    assert last > 60 and home.database.is_file()  # the last restore was not killed
    with pytest.raises(RequestError, match="the folder is not empty"):
        restore(tmp_path / "backup", home)
    assert read_inherited(home).runs == set()
