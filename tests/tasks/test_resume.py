"""Tasks killed at any instant resume exactly."""

import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import context
from task_cases import (
    DIGITS,
    episodes,
    make_bundle,
    make_job,
    metrics,
    run_in,
    run_on_a_slow_disk,
    run_task,
    summary,
)

from perilune.bundle.compare import compare_artifacts
from perilune.bundle.job import Job
from perilune.errors import WorkFailedError
from perilune.execution.placements.local import restore_outputs
from perilune.files import read_json_lines, sha256_file

pytestmark = pytest.mark.slow

STEPS = 30


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_task(tmp_path_factory.mktemp("collect") / "bundle", "collect") / "artifacts" / "traces"


KEEP = {"optimizer": True}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An rl run without interruption."""
    return run_task(tmp_path_factory.mktemp("uninterrupted") / "bundle", "rl", kl=0.05, keep=KEEP)


def metrics_bytes(bundle: Path) -> bytes:
    return (bundle / "artifacts" / "metrics.jsonl").read_bytes()


def final_weights(bundle: Path) -> str:
    return sha256_file(bundle / "artifacts" / "checkpoints" / "final" / "model.safetensors")


def checkpoint_bytes(bundle: Path) -> dict[str, str]:
    """Digests of all files of the final checkpoint, including the optimizer state."""
    final = bundle / "artifacts" / "checkpoints" / "final"
    return {str(path.relative_to(final)): sha256_file(path) for path in final.rglob("*") if path.is_file()}


def next_attempt(job: Job, inputs: dict[str, Path], previous: Path | None, folder: Path) -> Path:
    """A bundle with the artifacts of the dead attempt, as the control plane makes it."""
    number = int(previous.name) + 1 if previous else 1
    bundle = make_bundle(folder / str(number), job, inputs)
    if previous:
        restore_outputs(previous / "artifacts", bundle / "artifacts")
    return bundle


def lines_of(bundle: Path) -> int:
    path = bundle / "artifacts" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def being_written(bundle: Path, pattern: str) -> bool:
    return any((bundle / "artifacts" / "checkpoints").glob(pattern))


# The condition to wait for before a kill, and the maximum of a random delay in seconds.
INSTANTS: dict[str, tuple[Callable[[Path], bool], float]] = {
    "before the first step": (lambda bundle: (bundle / "runtime").exists(), 0.4),
    "while a checkpoint is written": (lambda bundle: being_written(bundle, ".step-*.tmp"), 0.03),
    "when half of the steps are done": (lambda bundle: lines_of(bundle) >= STEPS // 2, 0.3),
    "while an old checkpoint is removed": (lambda bundle: being_written(bundle, ".step-*.old"), 0.003),
    "while the final one is written": (lambda bundle: being_written(bundle, ".final.partial"), 0.03),
}


@pytest.mark.parametrize("task", [pytest.param("sft", marks=pytest.mark.thorough), "rl"])
def test_run_killed_at_any_instant_resumes_exactly(task: str, traces: Path, tmp_path: Path) -> None:
    """train(30) equals train(15), SIGKILL, resume: weights, optimizer, metrics and episodes, to the byte."""
    inputs = {"data": traces} if task == "sft" else {}
    options: dict[str, Any] = {"steps": STEPS, "save_every": 3, "keep": KEEP}
    options |= {"kl": 0.05, "eval": {"every": 4, "tasks": 4, "samples": 2}} if task == "rl" else {}
    whole = run_task(tmp_path / "whole", task, inputs=inputs, **options)
    job = make_job(task, inputs=inputs, **options)

    attempt: Path | None = None
    for instant, (come, within) in INSTANTS.items():
        attempt = next_attempt(job, inputs, attempt, tmp_path / "attempts")
        process = context.Process(target=run_on_a_slow_disk, args=(attempt,))
        process.start()
        while process.is_alive() and not come(attempt):
            time.sleep(0.001)
        time.sleep(random.uniform(0.0, within))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"the process ended before the kill {instant}"
        assert not (attempt / "artifacts" / "summary.json").exists()
    attempt = run_in(next_attempt(job, inputs, attempt, tmp_path / "attempts"))

    resumed = [event["step"] for event in read_json_lines(attempt / "runtime" / "events.jsonl")
               if event["kind"] == "resumed"]  # fmt: skip
    assert resumed[0] >= STEPS // 2, "the last attempt did not resume the steps of earlier attempts"
    assert compare_artifacts(whole, attempt) == []
    assert metrics_bytes(whole) == metrics_bytes(attempt)
    assert checkpoint_bytes(whole) == checkpoint_bytes(attempt)
    assert {"model.safetensors", "optimizer/second_moments.safetensors"} <= checkpoint_bytes(whole).keys()
    audited = [(bundle / "artifacts" / "reward_audit.json").exists() for bundle in (whole, attempt)]
    assert audited == [task == "rl"] * 2


def test_artifacts_depend_on_the_seed_alone(uninterrupted: Path, tmp_path: Path) -> None:
    again = run_task(tmp_path / "again", "rl", kl=0.05, keep=KEEP)
    assert compare_artifacts(uninterrupted, again) == []
    other = run_task(tmp_path / "other", "rl", kl=0.05, seed=2)
    assert metrics(other) != metrics(uninterrupted)
    assert final_weights(other) != final_weights(uninterrupted)
    assert set(episodes(other)["task_id"]) != set(episodes(uninterrupted)["task_id"])


def test_finished_steps_are_not_repeated(uninterrupted: Path, tmp_path: Path) -> None:
    """Killed between the final checkpoint and the summary."""
    bundle = make_bundle(tmp_path / "bundle", make_job("rl", kl=0.05, keep=KEEP))
    restore_outputs(uninterrupted / "artifacts", bundle / "artifacts")
    for name in ("timings.jsonl", "summary.json"):
        (bundle / "artifacts" / name).unlink()
    run_in(bundle)
    events = list(read_json_lines(bundle / "runtime" / "events.jsonl"))
    assert [(event["kind"], event["step"]) for event in events] == [("resumed", 4)]
    assert not (bundle / "artifacts" / "timings.jsonl").exists()  # no step ran
    assert summary(bundle)["last"] == summary(uninterrupted)["last"]
    assert final_weights(bundle) == final_weights(uninterrupted)


def test_attempt_after_the_summary_does_nothing(tmp_path: Path) -> None:
    """Killed before the result was recorded but after the optimizer state was deleted."""
    whole = run_task(tmp_path / "whole", "rl", kl=0.05)
    assert "optimizer/state.json" not in checkpoint_bytes(whole)
    bundle = make_bundle(tmp_path / "bundle", make_job("rl", kl=0.05))
    restore_outputs(whole / "artifacts", bundle / "artifacts")
    run_in(bundle)
    assert not (bundle / "runtime" / "events.jsonl").exists()
    assert compare_artifacts(whole, bundle) == []
    assert checkpoint_bytes(whole) == checkpoint_bytes(bundle)


def test_damaged_final_checkpoint_is_rebuilt(uninterrupted: Path, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle", make_job("rl", kl=0.05, keep=KEEP))
    restore_outputs(uninterrupted / "artifacts", bundle / "artifacts")
    damaged = bundle / "artifacts" / "checkpoints" / "final" / "optimizer" / "first_moments.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (bundle / "artifacts" / "summary.json").unlink()
    run_in(bundle)
    assert compare_artifacts(uninterrupted, bundle) == []


def test_partial_checkpoint_is_removed(uninterrupted: Path, tmp_path: Path) -> None:
    """Run in the same directory again, as a manual `perilune worker` does."""
    bundle = make_bundle(tmp_path / "bundle", make_job("rl", kl=0.05, keep=KEEP))
    unfinished = bundle / "artifacts" / "checkpoints" / ".step-000002.0a1b.tmp"
    unfinished.mkdir(parents=True)
    (unfinished / "weights.safetensors").write_bytes(b"half")
    run_in(bundle)
    assert compare_artifacts(uninterrupted, bundle) == []


@pytest.mark.parametrize("task", ["evaluate", "collect"])
def test_task_without_steps_restarts_exactly(task: str, tmp_path: Path) -> None:
    first = run_task(tmp_path / "first", task)
    second = make_bundle(tmp_path / "second", make_job(task))
    restore_outputs(first / "artifacts", second / "artifacts")
    assert compare_artifacts(first, run_in(second)) == []


def test_dead_steps_of_earlier_attempts_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a run that is killed often would never stop."""
    monkeypatch.setattr("perilune.tasks.rl.metrics.MAX_DEAD_STEPS", 3)
    job = make_job("rl", environment={**DIGITS, "equal": 0.0}, steps=8)
    first = make_bundle(tmp_path / "1", job)
    with pytest.raises(WorkFailedError, match="for 3 steps"):
        run_in(first)
    assert len(metrics(first)) == 3
    second = make_bundle(tmp_path / "2", job)
    restore_outputs(first / "artifacts", second / "artifacts")
    shutil.rmtree(second / "artifacts" / "checkpoints" / "step-000003", ignore_errors=True)
    with pytest.raises(WorkFailedError, match=r"step 3: .* for 3 steps"):
        run_in(second)
