"""Later stages of an experiment start without the command that submitted it, and each starts once."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from drill_cases import drill_job, wait_for
from sqlalchemy import select

from perilune.bundle.freeze import freeze, job_document
from perilune.control.queries.explanation import explain_run
from perilune.control.record.store import Event, Experiment, Run
from perilune.control.record.transitions import RunState
from perilune.control.runs import next_stage as next_stage_module
from perilune.control.runs.current_submission import (
    BLOCKED_EVENT,
    ExperimentCancelledError,
    experiments_to_advance,
)
from perilune.control.runs.experiments import Control, advance, open_experiment, plan_stages
from perilune.control.runs.next_stage import StageStarter, read_recipe
from perilune.control.runs.progress import StageFailed, StageFinished, StageStarted
from perilune.control.runs.requests import cancel_experiment, cancel_run, request_experiment_cancel
from perilune.control.runs.submission import Submission, submit_stage
from perilune.errors import PeriluneError, RequestError
from perilune.recipe.load import bundled_recipe, bundled_recipes, load_recipe
from perilune.recipe.schema import Recipe

RECIPE = """
name: three
model: {{preset: tiny}}
environment: {{id: calculator}}
resources: {{device: cpu, threads: 1}}
stages:
  - {{name: first, task: drill, steps: 1, gate: {gates}/first}}
  - {{name: second, task: drill, data: first, steps: 1, gate: {gates}/second}}
  - {{name: third, task: drill, data: second, steps: 1, gate: {gates}/third}}
"""
STAGES = ("first", "second", "third")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "gates").mkdir()
    path = tmp_path / "three.yaml"
    path.write_text(RECIPE.format(gates=tmp_path / "gates"))
    return path


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def begin(processes: list[subprocess.Popen[str]], *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "perilune.cli.main", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes.append(process)
    return process


def daemon(processes: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    process = begin(processes, "daemon", "--every", "0.2")
    assert process.stdout is not None and "watching" in process.stdout.readline()
    return process


def runs(control: Control) -> list[Run]:
    with control.store.snapshot() as session:
        return list(session.scalars(select(Run).order_by(Run.id)))


def kinds(control: Control) -> list[str]:
    with control.store.snapshot() as session:
        kinds = session.scalars(select(Event.kind).where(Event.kind.startswith("experiment.")))
        return [kind.removeprefix("experiment.") for kind in kinds]


@pytest.mark.parametrize("name", [name for name in bundled_recipes() if "/" not in name])
def test_recorded_recipe_plans_the_same_jobs(control: Control, name: str) -> None:
    read = load_recipe(bundled_recipe(name))
    recorded = read_recipe(control, open_experiment(control, read))

    def jobs_and_inputs(recipe: Recipe) -> list[tuple[bytes, dict[str, str]]]:
        return [(job_document(plan.job), dict(plan.consumes)) for plan in plan_stages(recipe)]

    assert jobs_and_inputs(recorded) == jobs_and_inputs(read)


@pytest.mark.thorough
def test_each_later_stage_starts_once_despite_kills_and_concurrent_commands(
    control: Control, recipe: Path, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    first_daemon = daemon(processes)
    out, _ = begin(processes, "run", str(recipe), "--detach", "--json").communicate(timeout=60)
    started = json.loads(out)
    assert started["daemon"] and "pid" not in started and started["stage"] == "first"
    attempt = control.home.attempt(started["run"], 1)
    wait_for((attempt / "runtime" / "claim.json").exists, "the first stage's claim")
    assert explain_run(control, started["run"]).next.endswith("; then stage second starts")

    # No process is alive between the first two stages.
    first_daemon.send_signal(signal.SIGKILL)
    first_daemon.wait()
    (tmp_path / "gates" / "first").touch()
    wait_for((attempt / "runtime" / "result.json").exists, "the first stage's result")
    assert [run.stage for run in runs(control)] == ["first"]

    # Then three processes advance the experiment: a daemon, a repeated `run`, and a `wait`.
    daemon(processes)
    attached = begin(processes, "run", str(recipe), "--json")
    waiting = begin(processes, "wait", "three", "--json")
    wait_for(lambda: len(runs(control)) == 2, "the second stage")
    attached.send_signal(signal.SIGKILL)
    attached.wait()
    for stage in STAGES:
        (tmp_path / "gates" / stage).touch()
    out, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, err
    assert json.loads(out)["stage"] == "third"

    assert [(run.stage, run.state, run.current_epoch) for run in runs(control)] == [
        (stage, "succeeded", 1) for stage in STAGES
    ]
    assert control.summary(runs(control)[-1])["total"] == 3
    wait_for(lambda: kinds(control)[-1] == "completed", "the completed submission")
    assert kinds(control) in (  # the repeated command may have submitted again
        ["created", "submitted", "completed"], ["created", "submitted", "submitted", "completed"],
    )  # fmt: skip


def test_cancelled_or_failed_experiment_starts_no_stage_until_run_again(
    control: Control, recipe: Path, tmp_path: Path
) -> None:
    read = load_recipe(recipe, [f"third.{key}" for key in ("fail_at=0", "how=work")])
    (tmp_path / "gates" / "third").touch()
    experiment, plans = open_experiment(control, read), plan_stages(read)
    assert [plan.job for plan in plan_stages(read_recipe(control, experiment))] == [p.job for p in plans]
    starter = StageStarter(control)

    def started_stages() -> list[object]:
        return [what for _, what in starter.start_next_stages()]

    first = next(advance(control, experiment, plans)).run_id
    assert started_stages() == []  # the first stage is active
    control.reconciler.reconcile(first)
    (tmp_path / "gates" / "first").touch()
    wait_for(lambda: starter.advance_run(first)[1])
    assert explain_run(control, first).next == "stage second starts"
    starter = StageStarter(control)  # the other's announcement ends with it
    assert explain_run(control, first).next == "stage second starts with the next command"
    assert cancel_experiment(control, experiment) == []  # between two stages
    with control.store.snapshot() as session:  # no run is the cause
        details = session.scalars(select(Event.detail).where(Event.kind == "experiment.cancelled"))
        assert details.all() == [{"experiment": experiment}]
    assert started_stages() == [] and starter.advance_experiment(experiment)[1] == RunState.CANCELLED
    assert "with the next `perilune run`" in explain_run(control, first).next
    with pytest.raises(RequestError, match="the experiment is not running"):
        cancel_experiment(control, experiment)

    events = advance(control, experiment, plans)  # submitted again: the first stage is reused
    assert next(events).run_id == first
    (begun,) = started_stages()
    joined = next(events)
    assert isinstance(begun, StageStarted) and isinstance(joined, StageStarted)
    assert joined.run_id == begun.run_id and not joined.attached

    def submit_newer_code(stage: str) -> str:  # another digest, as from a daemon of another version
        submission = Submission(experiment, stage, "drill", part="later")
        return submit_stage(
            control.home, control.store, submission, partial(freeze, drill_job(stage, say="newer"), {})
        ).id

    assert submit_newer_code("second") == begun.run_id
    cancel_run(control, begun.run_id)
    assert "repeats it, then starts stage third" in explain_run(control, begun.run_id).next
    assert started_stages() == []
    with pytest.raises(ExperimentCancelledError):
        submit_newer_code("third")  # by a process that was about to start it
    assert len(runs(control)) == 2

    (tmp_path / "gates" / "second").touch()
    last = list(advance(control, experiment, plans))[-1]
    assert isinstance(last, StageFailed) and (last.stage, last.cause) == ("third", "work_failed")
    assert started_stages() == [] and starter.advance_experiment(experiment)[1] == RunState.FAILED
    assert kinds(control) == ["created", *["submitted", "cancelled"] * 2, "submitted", "failed"]


def test_cancel_request_of_experiment_survives_a_kill(control: Control, recipe: Path) -> None:
    read = load_recipe(recipe)
    experiment = open_experiment(control, read)
    first = next(advance(control, experiment, plan_stages(read))).run_id
    control.reconciler.reconcile(first)
    assert request_experiment_cancel(control, experiment) == [first]  # the command is killed afterwards
    wait_for(lambda: control.reconciler.reconcile(first).state == "cancelled", "the end of the run")


def test_blocked_next_stage_is_reported_once_and_starts_when_repaired(
    control: Control, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stage in STAGES:
        (tmp_path / "gates" / stage).touch()
    read = load_recipe(recipe)
    experiment, plans = open_experiment(control, read), plan_stages(read)
    events = advance(control, experiment, plans, poll=0.02)
    first = next(event for event in events if isinstance(event, StageFinished)).run_id
    del events  # like a kill
    output = control.directory(control.run(first)) / "artifacts" / "data"
    output.rename(tmp_path / "aside")
    starter = StageStarter(control)
    ((_, error),) = starter.start_next_stages()
    assert isinstance(error, PeriluneError) and "produced no data" in str(error)
    assert list(starter.start_next_stages()) == []  # the second pass
    assert any("produced no data" in fact for fact in explain_run(control, first).because)
    ((_, again),) = StageStarter(control).start_next_stages()  # another process reports it too
    assert str(again) == str(error)
    with monkeypatch.context() as patch:  # another version, or a broken plugin
        patch.setattr(next_stage_module, "read_recipe", lambda *_: {}["stages"])
        ((_, broken),) = StageStarter(control).start_next_stages()
    assert "KeyError" in str(broken)
    (tmp_path / "aside").rename(output)
    assert [type(what) for _, what in StageStarter(control).start_next_stages()] == [StageStarted]
    with control.store.snapshot() as session:
        assert len(list(session.scalars(select(Event).where(Event.kind == BLOCKED_EVENT)))) == 3
        assert session.get_one(Experiment, experiment).requested
    assert not experiments_to_advance(control.store)
