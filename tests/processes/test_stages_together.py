"""Stages in several processes leave what they leave in one, and none outlives another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from process_cases import in_processes
from task_cases import make_bundle, make_job, run_in, run_task

from perilune.bundle.compare import compare_artifacts
from perilune.bundle.plugin import load_plugin
from perilune.bundle.workspace import FollowerWorkspace
from perilune.files import sha256_file


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
    "rl": {"kl": 0.05, "token_budget": 60, "updates_per_batch": 2},
    "preference": {"token_budget": 300},
    "reward_model": {"token_budget": 300},
    "distill": {"token_budget": 40},
}


@pytest.mark.parametrize("task", STAGES)
def test_a_stage_in_two_processes_leaves_the_same_bytes(
    task: str, inputs: dict[str, Path], tmp_path: Path
) -> None:
    data = {"sft": "traces", "preference": "pairs", "reward_model": "pairs"}.get(task)
    given = {"data": inputs[data]} if data else {}
    job = make_job(task, inputs=given, **STAGES[task])
    alone = run_in(make_bundle(tmp_path / "alone", job, given))
    both = in_two(make_bundle(tmp_path / "both", job, given))
    assert compare_artifacts(alone, both) == []
    assert weights(alone) == weights(both)
