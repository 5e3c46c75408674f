"""`perilune rm` deletes an experiment completely or not at all and keeps shared runs; the record verifies."""

import json
import os
import signal
import subprocess
import sys

import pytest
from drill_cases import Command, begin, carry_out, drill_plan, hanging, only_run
from fault_points import REMOVAL_POINTS
from sqlalchemy import select

from perilune.control.evidence.verification import (
    find_record_problem,
    find_run_problems,
    find_unrecorded_runs,
)
from perilune.control.record.faults import KILL_AT
from perilune.control.record.store import Event, Experiment, Run
from perilune.control.runs.experiments import Control, register_experiment
from perilune.control.runs.progress import StageReused
from perilune.control.runs.requests import cancel_run
from perilune.control.runs.submission import SUBMISSION_FILE
from perilune.files import read_json, write_json


def killed_at(point: str, name: str) -> None:
    command = [sys.executable, "-m", "perilune.cli.main", "rm", name, "--yes"]
    done = subprocess.run(command, env={**os.environ, KILL_AT: point}, check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def runs_of(control: Control) -> dict[str, Run]:
    with control.store.snapshot() as session:
        return {run.id: run for run in session.scalars(select(Run).order_by(Run.id))}


def test_rm_deletes_experiment_and_keeps_shared_runs(control: Control, perilune: Command) -> None:
    shared, own = drill_plan("shared", steps=1), drill_plan("own", steps=2)
    carry_out(control, shared, own, name="first")
    assert type(carry_out(control, shared, name="second")[0]) is StageReused
    before = runs_of(control)
    assert len(before) == 2
    kept, gone = before.values()

    code, out, _ = perilune("rm", "first")
    assert code == 0 and "perilune rm first --yes" in out
    assert f"remove own, succeeded, run {gone.id}" in out and f"keep   run {kept.id}" in out
    assert runs_of(control).keys() == before.keys()  # a preview only

    code, out, _ = perilune("rm", "first", "--yes", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["removed"] and document["runs"] == [gone.id]
    left = runs_of(control)
    assert list(left) == [kept.id]
    with control.store.snapshot() as session:
        (second,) = session.scalars(select(Experiment))
    assert second.name == "second" and left[kept.id].experiment_id == second.id
    assert read_json(control.home.run(kept.id) / SUBMISSION_FILE)["experiment"] == second.id
    assert [path.name for path in control.home.runs.iterdir()] == [kept.id]
    assert [path.name for path in control.home.experiments.iterdir()] == [second.id]
    assert list(find_run_problems(control, left[kept.id])) == [] and find_record_problem(control) == ""
    for command in (("verify",), ("runs",), ("events",), ("gc",)):
        assert perilune(*command)[0] == 0, command

    # The same recipe is a new experiment and reuses the shared run.
    kinds = [type(event) for event in carry_out(control, shared, own, name="first")]
    assert kinds[0] is StageReused and len(kinds) > 2
    for name in ("third", ""):
        code, _, err = perilune("rm", name, "--yes")
        assert code == 2 and f"no experiment is called '{name}'" in err
    code, _, err = perilune("cancel", "")
    assert code == 2 and "no run or experiment is called ''" in err


@pytest.mark.thorough
def test_next_command_completes_killed_rm(control: Control, perilune: Command) -> None:
    for number, point in enumerate(REMOVAL_POINTS, start=1):
        carry_out(control, drill_plan(steps=number), name=point)
        killed_at(point, point)
        assert runs_of(control) == {}  # the database is changed first
        assert list(control.home.experiments.iterdir())
        assert bool(list(control.home.runs.iterdir())) == (point == "remove.recorded")
        assert perilune("verify")[0] == 0  # any command completes the removal
        assert find_unrecorded_runs(control.home, control.store) == [] and find_record_problem(control) == ""
        assert not list(control.home.runs.iterdir()) and not list(control.home.experiments.iterdir())
    with control.store.snapshot() as session:
        removed = session.scalars(select(Event).where(Event.kind == "experiment.removed")).all()
    assert [row.detail["name"] for row in removed] == list(REMOVAL_POINTS)


def test_unrecorded_run_without_removal_event_is_kept(control: Control) -> None:
    carry_out(control, drill_plan(steps=1))
    stranger = control.home.run("01J00000000000000000000000") / "attempts" / "1"
    stranger.mkdir(parents=True)
    control.reconciler.reconcile_all()
    assert stranger.is_dir()


def test_rm_refuses_live_runs(control: Control, perilune: Command) -> None:
    hanging(control)
    run = only_run(control)
    code, _, err = perilune("rm", "drills", "--yes")
    assert code == 2 and f"run {run.id} of stage drill is active" in err and "perilune cancel" in err
    assert control.directory(run).is_dir()
    cancel_run(control, run.id, force=True)
    weights = str(control.directory(run) / "artifacts" / "checkpoints" / "final")
    copy = register_experiment(
        control, "copy", {"name": "copy", "model": {"path": weights}, "stages": []}, []
    )
    write_json(control.home.experiment(copy) / "recipe.json", {"model": {"path": weights}})
    code, out, _ = perilune("rm", "drills", "--yes")
    assert code == 0 and "copy started from one of these checkpoints" in out
    assert runs_of(control) == {}
    plan = drill_plan("waiting", steps=1)
    experiment = begin(control, [plan], name="empty")  # no run yet
    assert perilune("rm", experiment, "--yes")[0] == 0
