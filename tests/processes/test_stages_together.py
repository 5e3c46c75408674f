"""Stages in several processes produce the artifacts of one process, and all processes end together."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from drill_cases import family, start_worker, verdict_of, wait_for
from process_cases import PATIENCE, in_processes
from task_cases import make_bundle, make_job, metrics, run_in, run_task

from perilune.bundle.compare import compare_artifacts
from perilune.bundle.freeze import freeze
from perilune.bundle.plugin import load_plugin
from perilune.bundle.workspace import FollowerWorkspace
from perilune.cli.train.plan import derive_plans
from perilune.execution.placements.local import restore_outputs
from perilune.files import sha256_file
from perilune.recipe.load import bundled_recipe, load_recipe
from perilune.recipe.schema import build_job

pytestmark = pytest.mark.slow


def run_as_one_of(bundle: Path) -> None:
    if os.environ["RANK"] == "0":
        run_in(bundle)
    else:
        follower = FollowerWorkspace(bundle)
        load_plugin(follower.job.task).run(follower)


def in_two(bundle: Path) -> Path:
    for error in in_processes(run_as_one_of, 2, bundle):
        if error is not None:
            raise error
    return bundle


def weights(bundle: Path) -> str:
    return sha256_file(bundle / "artifacts" / "checkpoints" / "final" / "model.safetensors")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("inputs")
    return {
        "traces": run_task(root / "collect", "collect") / "artifacts" / "traces",
        "pairs": run_task(root / "pairs", "pairs") / "artifacts" / "pairs",
    }


STAGES: dict[str, dict[str, Any]] = {
    "sft": {"token_budget": 60},
    "rl": {"kl": 0.05, "token_budget": 20, "updates_per_batch": 2},
    "preference": {"token_budget": 300},
    "reward_model": {"token_budget": 300},
    "distill": {"token_budget": 40},
}


def test_only_parallel_stages_get_several_processes() -> None:
    recipe = load_recipe(bundled_recipe("quickstart"), ["resources.processes=2"])
    given = {stage.name: build_job(recipe, stage).resources.processes for stage in recipe.stages}
    assert given == {"traces": 1, "base": 1, "sft": 2, "after_sft": 1, "rl": 2, "after_rl": 1}
    plan = {stage["name"]: stage["derived"].get("processes") for stage in derive_plans(recipe)}
    assert plan["rl"] == "2, each with that memory"
    assert plan["traces"] is None


@pytest.mark.parametrize("task", STAGES)
def test_stage_in_two_processes_writes_the_same_bytes(
    task: str, inputs: dict[str, Path], tmp_path: Path
) -> None:
    data = {"sft": "traces", "preference": "pairs", "reward_model": "pairs"}.get(task)
    given = {"data": inputs[data]} if data else {}
    job = make_job(task, inputs=given, **STAGES[task])
    alone = run_in(make_bundle(tmp_path / "alone", job, given))
    both = in_two(make_bundle(tmp_path / "both", job, given))
    assert compare_artifacts(alone, both) == []
    assert weights(alone) == weights(both)


def test_sharded_stage_matches_one_process_to_rounding(tmp_path: Path) -> None:
    job = make_job("rl", **STAGES["rl"])
    resources = job.resources.model_copy(update={"sharded": True})
    alone = run_in(make_bundle(tmp_path / "alone", job))
    both = in_two(make_bundle(tmp_path / "both", job.model_copy(update={"resources": resources})))
    assert weights(alone) != weights(both)  # otherwise nothing was sharded
    for row, other in zip(metrics(alone), metrics(both), strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_step_with_fewer_tasks_than_processes(tmp_path: Path) -> None:
    """The second process plays and learns nothing, and still keeps the same state."""
    job = make_job("rl", prompts=1, steps=2)
    alone = run_in(make_bundle(tmp_path / "alone", job))
    assert compare_artifacts(alone, in_two(make_bundle(tmp_path / "both", job))) == []


def test_stage_resumes_in_more_processes(tmp_path: Path) -> None:
    job = make_job("rl", kl=0.05, keep={"last": 9})
    whole = run_in(make_bundle(tmp_path / "whole", job))
    rest = make_bundle(tmp_path / "rest", job)
    restore_outputs(whole / "artifacts", rest / "artifacts")
    for later in ("final", "step-000003"):
        shutil.rmtree(rest / "artifacts" / "checkpoints" / later)
    assert compare_artifacts(whole, in_two(rest)) == []
    assert '"resumed","step":2' in (rest / "runtime" / "events.jsonl").read_text()


@pytest.mark.thorough
def test_killed_process_ends_all_and_run_resumes_in_fewer(tmp_path: Path) -> None:
    """The worker names the killed process, ends at once, and leaves no process behind."""
    alone = make_job("rl", steps=19, save_every=3)
    resources = alone.resources.model_copy(update={"processes": 2})
    freeze(alone.model_copy(update={"resources": resources}), {}, tmp_path / "1")
    worker = start_worker(tmp_path / "1")
    wait_for(lambda: len(metrics(tmp_path / "1")) > 3, "the fourth step")
    ranks = {psutil.Process(pid).environ().get("RANK"): pid for pid in family(tmp_path / "1")}
    os.kill(ranks["1"], signal.SIGKILL)
    assert worker.wait(timeout=PATIENCE) == 1
    verdict = verdict_of(tmp_path / "1")
    assert verdict["cause"] == "killed"
    assert verdict["message"] == (
        "process 1 of 2, see artifacts/task.1.log: killed from outside with SIGKILL"
    )
    assert family(tmp_path / "1") == []
    assert "process 1 of 2" in (tmp_path / "1" / "artifacts" / "task.1.log").read_text()
    assert "process 0 of 2" in (tmp_path / "1" / "artifacts" / "task.log").read_text()

    rest = make_bundle(tmp_path / "2", alone)
    restore_outputs(tmp_path / "1" / "artifacts", rest / "artifacts")
    whole = run_in(make_bundle(tmp_path / "whole", alone))
    assert compare_artifacts(whole, run_in(rest)) == []
    assert weights(whole) == weights(rest)
