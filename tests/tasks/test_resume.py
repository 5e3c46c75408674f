"""A task killed at any instant and taken up again ends as if nothing had happened."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from task_cases import DIGITS, episodes, make_bundle, make_job, metrics, run_in, run_task, summary

from perilune.bundle.compare import compare_artifacts
from perilune.bundle.job import Job
from perilune.errors import WorkFailedError
from perilune.execution.placements.local import carry_over
from perilune.files import read_json_lines, sha256_file

KILLS = 3


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_task(tmp_path_factory.mktemp("collect") / "bundle", "collect") / "artifacts" / "traces"


@pytest.fixture(scope="module")
def climb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A climb that nobody disturbed."""
    return run_task(tmp_path_factory.mktemp("climb") / "bundle", "rl", kl=0.05)


@pytest.fixture(scope="module")
def processes() -> Iterator[Any]:
    """Processes forked from one that has torch loaded, so that each starts in a moment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "pandas", "perilune.tasks.observation", "perilune.tasks.training", "task_cases"]
    )
    yield context


def metrics_bytes(bundle: Path) -> bytes:
    return (bundle / "artifacts" / "metrics.jsonl").read_bytes()


def final_weights(bundle: Path) -> str:
    return sha256_file(bundle / "artifacts" / "checkpoints" / "final" / "model.safetensors")


def next_attempt(job: Job, inputs: dict[str, Path], previous: Path | None, folder: Path) -> Path:
    """A working copy as the control plane makes it after an attempt has died."""
    number = int(previous.name) + 1 if previous else 1
    bundle = make_bundle(folder / str(number), job, inputs)
    if previous:
        carry_over(previous / "artifacts", bundle / "artifacts")
    return bundle


@pytest.mark.parametrize("task", ["sft", "rl"])
def test_killed_at_random_instants(task: str, traces: Path, processes: Any, tmp_path: Path) -> None:
    inputs = {"data": traces} if task == "sft" else {}
    options: dict[str, Any] = {"steps": 20, "save_every": 3} | ({"kl": 0.05} if task == "rl" else {})
    whole = run_task(tmp_path / "whole", task, inputs=inputs, **options)
    job = make_job(task, inputs=inputs, **options)

    attempt: Path | None = None
    kills = 0
    while kills < KILLS:
        attempt = next_attempt(job, inputs, attempt, tmp_path / "attempts")
        carried = len(metrics(attempt))
        process = processes.Process(target=run_in, args=(attempt,))
        process.start()
        while process.is_alive() and len(metrics(attempt)) <= carried:
            time.sleep(0.005)
        time.sleep(random.uniform(0.0, 0.2))
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        kills += 1
    else:
        attempt = run_in(next_attempt(job, inputs, attempt, tmp_path / "attempts"))

    assert kills > 0, "the first attempt ended before it could be killed"
    assert attempt is not None
    assert compare_artifacts(whole, attempt) == []
    assert metrics_bytes(whole) == metrics_bytes(attempt)
    assert final_weights(whole) == final_weights(attempt)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(climb: Path, tmp_path: Path) -> None:
    again = run_task(tmp_path / "again", "rl", kl=0.05)
    assert compare_artifacts(climb, again) == []
    other = run_task(tmp_path / "other", "rl", kl=0.05, seed=2)
    assert metrics(other) != metrics(climb)
    assert final_weights(other) != final_weights(climb)
    assert set(episodes(other)["task_id"]) != set(episodes(climb)["task_id"])


def test_what_is_finished_is_not_done_again(climb: Path, tmp_path: Path) -> None:
    """Killed between the final checkpoint and the summary."""
    bundle = make_bundle(tmp_path / "bundle", make_job("rl", kl=0.05))
    carry_over(climb / "artifacts", bundle / "artifacts")
    (bundle / "artifacts" / "timings.jsonl").unlink()
    run_in(bundle)
    events = list(read_json_lines(bundle / "runtime" / "events.jsonl"))
    assert [(event["kind"], event["step"]) for event in events] == [("resumed", 4)]
    assert not (bundle / "artifacts" / "timings.jsonl").exists()  # no step was done
    assert summary(bundle)["last"] == summary(climb)["last"]
    assert final_weights(bundle) == final_weights(climb)


def test_a_damaged_final_checkpoint_is_made_again(climb: Path, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle", make_job("rl", kl=0.05))
    carry_over(climb / "artifacts", bundle / "artifacts")
    damaged = bundle / "artifacts" / "checkpoints" / "final" / "optimizer" / "first_moments.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    run_in(bundle)
    assert compare_artifacts(climb, bundle) == []


def test_what_was_being_written_is_removed(climb: Path, tmp_path: Path) -> None:
    """The same directory again, as `perilune worker` runs it by hand."""
    bundle = make_bundle(tmp_path / "bundle", make_job("rl", kl=0.05))
    unfinished = bundle / "artifacts" / "checkpoints" / ".step-000002.0a1b.tmp"
    unfinished.mkdir(parents=True)
    (unfinished / "weights.safetensors").write_bytes(b"half")
    run_in(bundle)
    assert compare_artifacts(climb, bundle) == []


@pytest.mark.parametrize("task", ["evaluate", "collect"])
def test_a_task_without_steps_begins_anew(task: str, tmp_path: Path) -> None:
    first = run_task(tmp_path / "first", task)
    second = make_bundle(tmp_path / "second", make_job(task))
    carry_over(first / "artifacts", second / "artifacts")
    assert compare_artifacts(first, run_in(second)) == []


def test_dead_steps_of_an_earlier_attempt_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a run that is killed often enough would never be called off."""
    monkeypatch.setattr("perilune.tasks.observation.DEAD_PATIENCE", 3)
    job = make_job("rl", environment={**DIGITS, "equal": 0.0}, steps=8)
    first = make_bundle(tmp_path / "1", job)
    with pytest.raises(WorkFailedError, match="for 3 steps"):
        run_in(first)
    assert len(metrics(first)) == 3
    second = make_bundle(tmp_path / "2", job)
    carry_over(first / "artifacts", second / "artifacts")
    shutil.rmtree(second / "artifacts" / "checkpoints" / "step-000003", ignore_errors=True)
    with pytest.raises(WorkFailedError, match=r"step 3: .* for 3 steps"):
        run_in(second)
