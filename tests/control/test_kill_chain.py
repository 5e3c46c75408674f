"""A run on rented machines survives the kill of every command: no intervention, no loss, no duplicate."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from cloud_cases import bill, rent_from, rented_template
from drill_cases import begin, drill_control, drill_plan, has_event, only_run, wait_for
from fault_points import MACHINE_POINTS, POINTS, REMOTE_POINTS
from kill_cases import killed_at_every_point
from sqlalchemy import select

from perilune.bundle.verify import verify
from perilune.control.machines import lifecycle as machines
from perilune.control.machines import listings
from perilune.control.machines import planner as machine_planner
from perilune.control.machines.rented import RentedPlacement
from perilune.control.queries.lookup import list_attempts
from perilune.control.record.store import Event, Machine, Operation, Run, verify_events
from perilune.control.record.transitions import RunState
from perilune.control.runs import endings, reconcile
from perilune.control.runs.experiments import Control, StagePlan, advance
from perilune.execution.placements.protocol import Capabilities
from perilune.execution.providers.fake.client import FakeCloud
from perilune.execution.providers.fake.weather import Fault, Weather
from perilune.files import read_json_lines

pytestmark = pytest.mark.slow

CANARY = "canary-9c41f6"
SECOND = Path("artifacts", "checkpoints", "step-000002")


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, seconds in (
        (machine_planner, "CONFIRM_INTERVAL_S", 0.05), (machine_planner, "CREATE_INTERVAL_S", 0.2),
        (listings, "LISTING_TTL_S", 0.0), (machines, "TERMINATE_INTERVAL_S", 0.05),
        (reconcile, "MAX_PAUSE_S", 0.2),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr(RentedPlacement, "capabilities", Capabilities(is_remote=True, look_interval_s=0.05))
    monkeypatch.setenv("DRILL_TOKEN", CANARY)


def idle(control: Control) -> bool:
    """Reconcile once; return whether nothing is left to do."""
    runs = control.reconciler.reconcile_all()  # with those that have ended since the last pass
    return (
        all(RunState(run.state).is_terminal for run in runs)
        and not control.reconciler.unclean_attempts()
        and not control.reconciler.rentals.fleet.machines()
    )


def recorded(home: Path) -> tuple[list[str], list[str]]:
    """States of all runs and keys of all machines; checks the hash chain of the events."""
    control = drill_control(home)
    with control.store.snapshot() as session:
        assert verify_events(session) is None
        runs, rented = list(session.scalars(select(Run))), list(session.scalars(select(Machine.key)))
        assert all((run.manifest_digest is not None) == (run.state == "succeeded") for run in runs)
    control.store.close()
    return [run.state for run in runs], rented


@pytest.mark.thorough
@pytest.mark.parametrize("weather", [Weather(notice_seconds=60.0)])
@pytest.mark.usefixtures("hurried")
def test_run_succeeds_although_every_command_is_killed(cloud: FakeCloud, tmp_path: Path) -> None:
    home = tmp_path / "killed"
    rent_from(home, cloud.folder)
    where = rented_template(tmp_path / "python", grace=1.0)
    job = drill_plan(steps=4, fail_at=2, how="hang", fresh_only=True, tell="DRILL_TOKEN").job
    plan = StagePlan("drill", job.model_copy(update={"secrets": ("DRILL_TOKEN",)}))
    taken = tmp_path / "taken"  # exists after the preemption notice of the first machine

    def command() -> None:
        control = drill_control(home)
        run_id = next(advance(control, begin(control, [plan]), [plan], template=where)).run_id
        while not idle(control):
            first = control.home.attempt(run_id, 1)
            if has_event(first, "hangs") and (first / SECOND).exists() and not taken.exists():
                (key,) = bill(cloud)["alive"]
                cloud.inject(key=key, fault=Fault.PREEMPTED, seconds=60.0)
                taken.touch()
            time.sleep(0.05)

    seen: list[list[str]] = [[]]

    def after(point: str) -> None:
        states, rented = recorded(home)
        assert len(states) <= 1 and (states or not seen[-1])  # no run is lost or duplicated
        assert "succeeded" not in seen[-1] or states == seen[-1]
        assert set(bill(cloud)["costs"]) <= set(rented)
        seen.append(states)

    points = killed_at_every_point(command, tmp_path / "points", after)
    assert set(points) == {*POINTS, *REMOTE_POINTS, *MACHINE_POINTS}, (
        "a point without a kill, or a kill without a named point"
    )
    assert seen[points.index("submit.accepted") + 1] == ["queued"]

    end = [sys.executable, "-m", "perilune.cli.main", "reconcile"]
    last = subprocess.run(
        end, check=False, env={**os.environ, "PERILUNE_HOME": str(home)}, capture_output=True, text=True
    )
    assert (last.returncode, last.stdout) == (0, "no live runs\n"), last.stderr
    control = drill_control(home)
    run = only_run(control)
    ends = [(attempt.state, attempt.cleanup) for attempt in list_attempts(control, run.id)]
    assert run.state == "succeeded" and ends == [("preempted", "done"), ("succeeded", "done")]
    directory = control.directory(run)
    assert verify(directory, run.bundle_digest) == []
    rows = read_json_lines(directory / "artifacts" / "metrics.jsonl")
    assert [row["total"] for row in rows] == [2, 6, 12, 20]
    log = (directory / "runtime" / "runtime.log").read_bytes()
    assert log == (directory / "artifacts" / "task.log").read_bytes() and b"[DRILL_TOKEN]" in log
    kept = [path for path in home.rglob("*") if path.is_file()]
    assert not any(CANARY.encode() in path.read_bytes() for path in kept)
    with control.store.snapshot() as session:
        assert {operation.status for operation in session.scalars(select(Operation))} == {"done"}
        kinds = list(session.scalars(select(Event.kind)))
    times = {"attempt.planned": 2, "attempt.running": 2, "machine.requested": 2, "machine.gone": 2}
    times |= {"attempt.preempted": 1, "attempt.succeeded": 1, "run.succeeded": 1, "machine.draining": 1}
    assert {kind: kinds.count(kind) for kind in times} == times
    control.store.close()
    assert bill(cloud)["alive"] == [] and len(bill(cloud)["costs"]) == 2


@pytest.mark.thorough
@pytest.mark.usefixtures("hurried")
def test_suspended_command_takes_no_result_after_its_machine_is_gone(
    cloud: FakeCloud, tmp_path: Path
) -> None:
    home, plan = tmp_path / "stopped", drill_plan(steps=2, noise=True)
    where = rented_template(tmp_path / "python", grace=1.0)
    rent_from(home, cloud.folder)

    def suspend_once(point: str) -> None:
        if point == "finalize.begun" and not (tmp_path / "once").exists():
            (tmp_path / "once").touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    def command() -> None:
        endings.kill_point = suspend_once
        control = drill_control(home)
        next(advance(control, begin(control, [plan]), [plan], template=where))
        while not idle(control):
            time.sleep(0.05)

    stopped = multiprocessing.get_context("fork").Process(target=command)
    stopped.start()
    wait_for(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED, "the suspended command")
    (key,) = bill(cloud)["alive"]
    cloud.inject(key=key, fault=Fault.HOST_DEATH)
    control = drill_control(home)

    def machine_is_gone() -> bool:
        control.reconciler.reconcile_all()
        return not control.reconciler.rentals.fleet.machines()

    wait_for(machine_is_gone, "the end of its machine")
    os.kill(stopped.pid or 0, signal.SIGCONT)
    stopped.join(60.0)
    assert stopped.exitcode == 0
    run = only_run(control)
    first, second = list_attempts(control, run.id)
    assert [(attempt.state, attempt.cause) for attempt in (first, second)] == [
        ("lost", "machine_lost"),
        ("succeeded", ""),
    ]
    assert first.manifest_digest is None and run.manifest_digest == second.manifest_digest
    assert idle(control) and verify(control.directory(run), run.bundle_digest) == []
    control.store.close()
