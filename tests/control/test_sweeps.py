"""Sweeps: each arm runs once, arms share equal stages, and failures or kills lose no result."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from drill_cases import Command, wait_for
from sqlalchemy import select

from perilune.cli.inspect.run_table import live_stages, make_live_table
from perilune.cli.output import make_console
from perilune.cli.train import sweep as sweep_command
from perilune.control.record.store import Event, Run
from perilune.control.runs.experiments import Control, open_experiment
from perilune.control.runs.sweeps import SweepRunner, find_sweep
from perilune.control.runs.templates import Template
from perilune.recipe.load import load_recipe

RECIPE = """
name: two
model: {{preset: tiny}}
environment: {{id: calculator}}
resources: {{device: cpu, threads: 1}}
stages:
  - {{name: first, task: drill, steps: 1, gate: "{gate}"}}
  - {{name: last, task: drill, data: first, steps: 1, how: work}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "two.yaml"
    path.write_text(RECIPE.format(gate=""))
    return str(path)


def runs(control: Control) -> list[Run]:
    with control.store.snapshot() as session:
        return list(session.scalars(select(Run).order_by(Run.id)))


def start_order(control: Control) -> list[str]:
    with control.store.snapshot() as session:
        query = select(Event.run_id).where(Event.kind == "attempt.planned").order_by(Event.seq)
        return [run for run in session.scalars(query) if run]


def test_arms_share_equal_stages_and_failed_arm_stops_no_other(
    perilune: Command,
    control: Control,
    recipe: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = (
        "sweep",
        recipe,
        "--set",
        "last.steps=1,2",
        "--set",
        "last.fail_at=-1,1",
        "--metric",
        "last.total",
    )
    code, out, err = perilune(*command, "--plan", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert code == 0 and plan["to_run"] == {"first": 1, "last": 4} and plan["seconds"] is None
    assert [arm["shared"] for arm in plan["arms"]] == [0, 1, 1, 1]
    assert not runs(control) and not list(control.home.experiments.iterdir())

    code, out, err = perilune(*command, "--slots", "2", "--json")
    document = json.loads(out)
    assert code == 1 and "1 of 4 experiments failed" in err and "nothing was learnt" in err
    assert [run.stage for run in runs(control)].count("first") == 1 and len(runs(control)) == 5
    assert sorted(document["keys"]) == ["last.fail_at", "last.steps"] and document["best"] == 3
    # first: (0 + 1) * (seed + 1) = 1; last adds 1, and 2 in its second step
    totals = [arm["figure"] and arm["figure"]["mean"] for arm in document["arms"]]
    assert totals == [2.0, 2.0, 4.0, None]
    assert document["arms"][3]["seeds"][0]["problem"] == "last is failed: nothing was learnt"
    assert Path(document["page"]).read_text().startswith("<!doctype html>")
    assert " --seeds 1..3 --metric last.total\n" in perilune("compare", document["sweep"])[1]

    # The same command retries only failed stages; a plan knows finished stages and their durations.
    assert perilune(*command, "--json")[0] == 1
    assert [run.stage for run in runs(control)].count("first") == 1 and len(runs(control)) == 6
    plan = json.loads(perilune(*command, "--plan", "--json")[1])
    assert plan["to_run"] == {"last": 1} and plan["seconds"] > 0
    code, out, err = perilune(*command[:-1], "last.bogus", "--plan", "--json")
    assert code == 0 and json.loads(out)["to_run"] == {"last": 1}
    assert "warning: no finished run of two/last has the figure last.bogus; last has " in err
    listed = json.loads(perilune("runs", "--json")[1])["runs"]
    assert ["last.steps=2", "last.fail_at=-1", "seed=0"] in [row["overrides"] for row in listed]
    assert "last.steps=2  last.fail_at=-1  seed=0" in perilune("runs")[1]

    # In a narrow terminal, no column is missing: rows are printed as text.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    out = perilune("compare", document["sweep"])[1]
    assert "last.steps 1, seeds 1, total 2, difference baseline\n" in out
    console = make_console()
    console.print(make_live_table(live_stages(control, 4, refresh=False), console.width))
    assert "  first, succeeded, try 1, time " in capsys.readouterr().out


def test_default_slots_need_the_device_cpu_and_a_number_of_threads(
    perilune: Command, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_command, "usable_threads", lambda: 4)
    text = Path(recipe).read_text()
    for resources, slots in (
        ("{device: cpu, threads: 1}", 4),
        ("{device: cpu, threads: 2}", 2),
        ("{device: cpu}", 1),
        ("{threads: 1}", 1),
    ):
        Path(recipe).write_text(text.replace("{device: cpu, threads: 1}", resources))
        code, out, err = perilune("sweep", recipe, "--plan", "--json")
        assert code == 0, err
        assert json.loads(out)["slots"] == slots, resources


@pytest.mark.thorough
def test_killed_sweep_continues_with_the_same_command(
    control: Control, tmp_path: Path, perilune: Command
) -> None:
    gate, path = tmp_path / "gate", tmp_path / "two.yaml"
    path.write_text(RECIPE.format(gate=gate))
    command = [
        "sweep",
        str(path),
        "--set",
        "last.steps=1,2",
        "--seeds",
        "2",
        "--metric",
        "last.total",
        "--json",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "perilune.cli.main", *command], stdout=subprocess.DEVNULL
    )
    wait_for(lambda: len(start_order(control)) == 1, "the first attempt")
    process.send_signal(signal.SIGKILL)
    process.wait()
    gate.touch()
    code, out, err = perilune(*command)
    assert code == 0, err
    document = json.loads(out)
    assert [arm["figure"]["mean"] for arm in document["arms"]] == [3.0, 6.0]  # over seeds 0 and 1
    assert document["arms"][1]["difference"]["differences"] == [2.0, 4.0]
    assert document["arms"][1]["difference"]["conclusion"] == "too few seeds"
    assert len(runs(control)) == 6 and all(run.current_epoch == 1 for run in runs(control))
    assert [sweep.name for sweep in map(find_sweep, [control] * 2, ["two-1", "two-2"]) if sweep] == ["two-1"]
    assert perilune("compare", "two-1", "--baseline", "2", "--json")[0] == 0


@pytest.mark.thorough
def test_slots_limit_active_arms_and_earlier_arms_finish_first(control: Control, recipe: str) -> None:
    runner = SweepRunner(control, Template(slots=1))
    experiments = []
    for seed in range(3):
        loaded = load_recipe(recipe, [f"seed={seed}"])
        experiments.append(open_experiment(control, loaded))
        runner.submit(experiments[-1], loaded)
    most = 0
    while runner.live:
        states = runner.reconcile()
        most = max(most, sum(run.state == "active" for run in runs(control)))
    assert most == 1 and all(state.succeeded for state in states.values())
    order = [next(run for run in runs(control) if run.id == arm) for arm in start_order(control)]
    ends = {
        arm: max(rank for rank, run in enumerate(order) if run.experiment_id == arm) for arm in experiments
    }
    assert sorted(ends, key=lambda arm: ends[arm]) == experiments


def test_cancel_stops_every_arm(control: Control, tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(RECIPE.format(gate=tmp_path / "never"))
    runner = SweepRunner(control, Template(slots=1))
    for steps in (1, 2):
        loaded = load_recipe(path, [f"last.steps={steps}"])
        runner.submit(open_experiment(control, loaded), loaded)
    wait_for(
        lambda: runner.reconcile() and any(run.state == "active" for run in runs(control)), "an active run"
    )
    stopping = runner.request_cancel()
    (run,) = runs(control)  # both arms share it
    assert (run.state, run.desired, stopping) == ("active", "cancelled", [run.id])  # survives a kill
    runner.cancel(stopping)
    assert [run.state for run in runs(control)] == ["cancelled"]
    assert all(state.is_over and not state.succeeded for state in runner.reconcile().values())


def test_invalid_keys_and_options_are_refused(perilune: Command, recipe: str, control: Control) -> None:
    for arguments, message in (
        (("--set", "last.stepz=1,2"), "last.stepz is not a known key"),
        (("--set", "last.steps=1..5"), "last.steps has a range"),
        (
            ("--set", "last.steps=1", "--random", "1", "--search", "1"),
            "--random and --search exclude each other",
        ),
        (("--seeds", "x"), "neither a number of seeds"),
        (("--metric", "after.pass@1"), "no stage is called 'after'"),
        (("--metric", "last", "--plan"), "no metric of the stage last is named"),
        (("--name", "a/b", "--plan"), "'a/b' cannot be the name of a sweep"),
        (("--template", "local", "--slots", "2"), "--slots applies to this machine only"),
    ):
        code, _, err = perilune("sweep", recipe, *arguments)
        assert code == 2 and message in err, err
    assert not runs(control)
