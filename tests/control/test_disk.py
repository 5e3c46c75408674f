"""Disk usage of a home: gc deletes only files that no run needs, and the remaining files verify."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from drill_cases import Command, carry_out, drill_job, drill_plan, family, hanging, only_run
from fault_points import REMOVAL_POINTS
from sqlalchemy import select

from perilune.bundle import storage
from perilune.bundle.attested import REMOVED, Evidence, attestation_problems
from perilune.bundle.envelope import PUBLIC, SigningKey, verify_statement
from perilune.bundle.storage import remove_tree
from perilune.bundle.verify import verify
from perilune.control.evidence.disk import _is_replaced, find_removable
from perilune.control.evidence.verification import export, find_record_problem, find_run_problems
from perilune.control.record.faults import KILL_AT
from perilune.control.record.store import Attempt, Event, Run
from perilune.control.runs.experiments import Control, StagePlan
from perilune.control.runs.progress import StageReused
from perilune.control.runs.requests import collect_evidence
from perilune.files import read_json, sha256_file


def gc(**environment: str) -> int:
    command = [sys.executable, "-m", "perilune.cli.main", "gc", "--yes", "--checkpoints"]
    return subprocess.run(
        command, env={**os.environ, **environment}, check=False, capture_output=True
    ).returncode


def event_details(control: Control, kind: str) -> list[dict[str, object]]:
    with control.store.snapshot() as session:
        return [dict(row.detail) for row in session.scalars(select(Event).where(Event.kind == kind))]


@pytest.mark.thorough
def test_gc_killed_at_any_point_leaves_files_complete_or_deleted(
    control: Control, tmp_path: Path, perilune: Command
) -> None:
    events, first = hanging(control)
    os.kill(family(first)[0], signal.SIGKILL)
    assert list(events)[-1].summary["began_at"] == 2
    run = only_run(control)
    second = control.directory(run)
    steps = sorted(path.name for path in (second / "artifacts" / "checkpoints").iterdir())
    assert len(steps) == 4
    code, out, _ = perilune("gc")
    assert code == 0 and "can be deleted: perilune gc --yes" in out and "step-" not in out
    assert f"attempt 1 of {run.id}" in out and first.is_dir()

    for point in REMOVAL_POINTS:
        assert gc(**{KILL_AT: point}) == -signal.SIGKILL
        assert list(find_run_problems(control, run)) == [] and control.is_intact(run)
        assert first.is_dir() == (point == "remove.recorded")
    assert gc() == 0
    assert not first.exists() and not list((second / "artifacts" / "checkpoints").glob("step-*"))
    assert find_removable(control, checkpoints=True) == []
    assert event_details(control, "checkpoints.removed")[0]["names"] == steps
    assert event_details(control, "attempt.removed")[-1]["bytes"]
    assert find_record_problem(control) == ""

    # The run is as usable as before: reuse, export and collect work.
    assert list(find_run_problems(control, run)) == [] and control.is_intact(run)
    plan = drill_plan(steps=4, fail_at=2, how="hang", fresh_only=True)
    assert [type(event) for event in carry_out(control, plan)] == [StageReused]
    export(control, run, tmp_path / "handed")
    assert (
        list(attestation_problems(Evidence.from_export(tmp_path / "handed", control.home.keys / PUBLIC)))
        == []
    )
    assert collect_evidence(control, run.id)
    code, out, _ = perilune("bundle", "verify", str(second))
    assert code == 0 and "4 artifacts were deleted by perilune gc" in out
    gone = read_json(second / "artifacts" / "manifest.json")["files"]
    assert {name for name in gone if not (second / "artifacts" / name).exists()} == {
        f"checkpoints/{step}/state.json" for step in steps
    }

    # Every other missing file is an error, and only the home's key may sign the list of deleted files.
    statement = verify_statement(second / REMOVED, control.home.keys / PUBLIC)
    total = second / "artifacts" / "data" / "total.json"
    kept = total.read_bytes()
    total.unlink()
    assert any("total.json is missing" in problem for problem in find_run_problems(control, run))
    statement["subject"].append({"name": "artifacts/data/total.json", "digest": {"sha256": "0"}})
    signed = (second / REMOVED).read_bytes()
    (second / REMOVED).write_bytes(SigningKey(tmp_path / "stranger").sign(statement))
    found = list(find_run_problems(control, run))
    assert any(line.startswith(f"{REMOVED} is not signed") for line in found) and not control.is_intact(run)
    assert any("total.json is missing" in line for line in found)
    (second / REMOVED).write_bytes(signed)
    total.write_bytes(kept)


def test_gc_keeps_attempts_that_are_still_needed() -> None:
    def replaced(number: int, current: int, state: str, run_state: str, cleanup: str = "done") -> bool:
        run = Run(state=run_state, current_epoch=current)
        return _is_replaced(Attempt(number=number, state=state, cleanup=cleanup), run)

    assert replaced(1, 2, "failed", "succeeded") and replaced(1, 3, "lost", "active")
    assert not replaced(2, 2, "failed", "failed")  # a retry starts from it
    assert not replaced(1, 2, "failed", "active")  # so does the attempt that is now staged
    assert not replaced(1, 2, "lost", "succeeded", "pending")  # it is not collected yet
    assert not replaced(1, 2, "running", "succeeded")


def test_gc_deletes_unused_environments_without_processes(control: Control, perilune: Command) -> None:
    environment = control.home.root / "environments" / "0123456789abcdef"
    (environment / "bin").mkdir(parents=True)
    python = environment / "bin" / "python"
    python.symlink_to(sys.executable)
    (environment / "complete").touch()
    assert find_removable(control, unused_days=1) == []
    os.utime(environment / "complete", (0, 0))
    command = [str(python), "-c", "print('here', flush=True); input()"]
    busy = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert busy.stdout is not None and busy.stdout.readline()
    assert find_removable(control, unused_days=1) == []
    busy.communicate(b"\n")
    assert [item.path for item in find_removable(control, unused_days=1)] == [environment]
    code, out, _ = perilune("gc", "--yes", "--json")
    assert code == 0 and [item["kind"] for item in json.loads(out)["removed"]] == ["environment"]
    assert (
        not environment.exists()
        and event_details(control, "environment.removed")[0]["name"] == environment.name
    )


def test_bundles_share_one_wheel_and_attempts_do_not(control: Control) -> None:
    carry_out(control, drill_plan(steps=1), drill_plan("again", steps=2))
    with control.store.snapshot() as session:
        runs = list(session.scalars(select(Run.id)))
    wheels = [next((control.home.bundle(run) / "scripts").glob("*.whl")) for run in runs]
    own = [next((control.home.attempt(run, 1) / "scripts").glob("*.whl")) for run in runs]
    assert len({wheel.stat().st_ino for wheel in wheels}) == 1 < len({wheel.stat().st_ino for wheel in own})
    (kept,) = (control.home.root / "wheels").iterdir()
    assert wheels[0].samefile(kept) and not any(kept.samefile(wheel) for wheel in own)

    kept.chmod(0o644)  # a changed wheel: no later bundle uses it
    kept.write_bytes(b"another")
    carry_out(control, drill_plan("third", steps=3), name="later")
    (kept,) = (control.home.root / "wheels").iterdir()
    assert sha256_file(kept) == kept.name

    for run in (*runs, only({path.name for path in control.home.runs.iterdir()} - set(runs))):
        remove_tree(control.home.bundle(run))
    control.reconciler.reconcile_all()
    assert not list((control.home.root / "wheels").iterdir())


def test_runs_share_one_model_copy_separate_from_the_users_folder(
    control: Control, tmp_path: Path, perilune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three runs start from one folder with a large read-only file; then the user edits that file."""
    monkeypatch.setattr(storage, "LINK_BYTES", 1000)  # bytes
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_bytes(b"1" * 5000)
    (folder / "weights").chmod(0o444)
    (folder / "config.json").write_text("{}")

    def used(name: str, steps: int) -> Path:
        """The weights in the bundle of a new run."""
        job = drill_job(name, steps=steps, data="model").model_copy(update={"model": {"path": str(folder)}})
        before = {path.name for path in control.home.runs.iterdir()}
        carry_out(control, StagePlan(name, job, {"data": "model"}), name=name)
        run = only({path.name for path in control.home.runs.iterdir()} - before)
        attempt, bundle = control.home.attempt(run, 1), control.home.bundle(run)
        assert list(verify(bundle)) == [] == list(verify(attempt))
        assert not (bundle / "inputs/model/config.json").samefile(attempt / "inputs/model/config.json")
        assert (attempt / "inputs/model/weights").samefile(bundle / "inputs/model/weights")
        return bundle / "inputs/model/weights"

    runs = [used(f"run{steps}", steps) for steps in (1, 2, 3)]
    (kept,) = (control.home.root / "inputs").iterdir()
    assert all(path.samefile(kept) for path in runs) and kept.name == sha256_file(folder / "weights")
    assert (folder / "weights").stat().st_nlink == 1

    (folder / "weights").chmod(0o644)
    (folder / "weights").write_bytes(b"2" * 5000)
    assert not used("edited", 1).samefile(kept) and runs[0].read_bytes() == b"1" * 5000

    kept.chmod(0o644)  # a changed copy in the home: no later bundle uses it
    kept.write_bytes(b"3" * 5000)
    (folder / "weights").write_bytes(b"1" * 5000)
    assert used("later", 1).read_bytes() == b"1" * 5000

    assert perilune("gc")[0] == 0
    assert len(list((control.home.root / "inputs").iterdir())) == 2, "runs use both"
    for run in control.home.runs.iterdir():
        remove_tree(run)
    assert perilune("gc")[0] == 0
    assert not list((control.home.root / "inputs").iterdir())


def only(names: set[str]) -> str:
    (name,) = names
    return name


def test_reconcile_sweeps_leftovers_of_killed_commands(control: Control, tmp_path: Path) -> None:
    """Leftovers: a killed backup, a half-written recipe and key, a killed restore to this home."""
    home, outside = control.home, tmp_path / "elsewhere" / ".friday.0a1b2c3d.tmp"
    outside.mkdir(parents=True)
    (home.temporary / "DEAD").mkdir()
    (home.temporary / "DEAD" / "building").write_text(str(outside))
    recipe = home.experiment("01KILLED") / ".recipe.json.0a1b2c3d.tmp"
    key, restore = home.keys / ".key.0a1b2c3d.tmp", tmp_path / ".home.0a1b2c3d.tmp"
    for path in (recipe, key):
        path.parent.mkdir(exist_ok=True)
        path.write_text("half")
    restore.mkdir()
    left = [outside, home.temporary / "DEAD", recipe, key, restore, recipe.parent]
    control.reconciler.reconcile_all()
    assert all(path.exists() for path in left)  # a command may still write to them
    for path in left:
        os.utime(path, (0, 0))
    control.reconciler.reconcile_all()
    assert not any(path.exists() for path in left[:-1])
    os.utime(recipe.parent, (0, 0))
    control.reconciler.reconcile_all()
    assert not recipe.parent.exists() and not control.reconciler.conditions.all()


@pytest.mark.parametrize(
    ("module", "function", "words"),
    [
        ("control.record.backup", "_copy_files", ["backup"]),
        ("control.runs.requests", "copy_file", ["collect", "drill", "--out"]),
        ("control.evidence.verification", "copy_file", ["export", "drill", "--out"]),
    ],
)
def test_gc_sweeps_folder_of_killed_command(
    control: Control,
    perilune: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    function: str,
    words: list[str],
) -> None:
    carry_out(control, drill_plan(steps=1))
    script = (
        f"import os; from perilune.cli.main import main; from perilune.{module.rpartition('.')[0]} import"
        f" {module.rpartition('.')[2]} as module\n"
        f"module.{function} = lambda *_: os.kill(os.getpid(), 9)\nmain()"
    )
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", script, *words, "friday"]
    environment = os.environ | {"PERILUNE_HOME": str(control.home.root)}
    killed = subprocess.run(command, capture_output=True, cwd=tmp_path / "out", env=environment, check=False)
    assert killed.returncode == -9, killed.stderr
    assert list((tmp_path / "out").iterdir())
    monkeypatch.setattr("perilune.control.record.home.SWEEP_AGE_S", 0.0)
    assert perilune("gc")[0] == 0
    assert not list((tmp_path / "out").iterdir())
