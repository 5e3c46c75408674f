"""Asynchronous training: rollout processes, replay of schedules, and resume after a kill."""

import shutil
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked import context
from task_cases import episodes, make_bundle, make_job, metrics, run_in, run_task

from perilune.bundle.compare import compare_artifacts
from perilune.execution.placements.local import restore_outputs
from perilune.files import read_json, read_json_lines
from perilune.tasks.rl.asynchronous.ray_channel import _Actor

pytestmark = pytest.mark.slow

CORRECTED = {"off_policy": {"proximal": "learner", "weight": "truncate"}}


def test_zero_staleness_equals_synchronous_training(tmp_path: Path) -> None:
    """Includes a curriculum, bfloat16 engine weights, and weight updates sent as deltas."""
    options = {**CORRECTED, "precision": "bfloat16", "curriculum": {"candidates": 2}}
    plain = run_task(tmp_path / "synchronous", "rl", **options)
    ahead = {"staleness": 0, "weights": "delta"}
    other = run_task(tmp_path / "asynchronous", "rl", asynchronous=ahead, **options)
    sent = [line["weights_bytes"] for line in read_json_lines(other / "artifacts" / "timings.jsonl")]
    assert sent[1] < sent[0]
    differences = {change.path for change in compare_artifacts(plain, other)}
    files = ("schedule.jsonl", "metrics.jsonl", "summary.json")
    assert differences <= {f"artifacts/{name}" for name in files}
    summaries = [read_json(folder / "artifacts" / "summary.json") for folder in (plain, other)]
    assert summaries[0]["last"] == summaries[1]["last"]
    copy = summaries[1]["memory"]["planned_bytes"] - summaries[0]["memory"]["planned_bytes"]
    assert copy == 2 * summaries[0]["parameters"]
    for line, again in zip(metrics(plain), metrics(other), strict=True):
        assert again.pop("mixed_versions") == 0
        assert line == again


WAITS = {  # a game of two players
    "id": "factory",
    "factory": "task_environments:Waits",
    "players": 2,
    "turns": 2,
    "episodes": {"max_tokens": 200},
}
OPTIONS: dict[str, Any] = {
    "environment": WAITS,
    "asynchronous": {"staleness": 2},
    "curriculum": {"candidates": 2},
    "steps": 8,
    "save_every": 2,
    "max_tokens": 40,
}


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a given schedule, which writes its own."""
    return run_task(tmp_path_factory.mktemp("free") / "bundle", "rl", **OPTIONS)


def following(schedule: Path, folder: Path) -> Path:
    bundle = make_bundle(folder, make_job("rl", **OPTIONS))
    (bundle / "runtime").mkdir()
    shutil.copy(schedule / "artifacts" / "schedule.jsonl", bundle / "runtime")
    return bundle


def test_run_replays_the_schedule_of_another_run(free: Path, tmp_path: Path) -> None:
    assert max(line["staleness_max"] for line in metrics(free)) >= 1
    assert max(line["mixed_versions"] for line in metrics(free)) > 0
    assert compare_artifacts(free, run_in(following(free, tmp_path / "again"))) == []


def test_tokens_per_second_count_the_whole_step(free: Path) -> None:
    """The learner waits only for what is not ready yet, so tokens per second of waiting mean nothing."""
    for line in read_json_lines(free / "artifacts" / "timings.jsonl"):
        seconds = sum(line[part] for part in ("sampling", "scoring", "learning", "other"))
        masks = episodes(free, f"step-{line['step']:06d}.parquet").loss_mask
        assert line["tokens_per_second"] == pytest.approx(sum(map(sum, masks)) / seconds, rel=0.01)


@pytest.mark.thorough
def test_killed_run_replays_its_schedule_after_resume(free: Path, tmp_path: Path) -> None:
    attempt = following(free, tmp_path / "0")
    for number, lines in enumerate((3, 6), 1):
        process = context.Process(target=run_in, args=(attempt,))
        process.start()
        while process.is_alive() and len(metrics(attempt)) < lines:
            time.sleep(0.01)
        process.kill()
        process.join()
        before, attempt = attempt, following(free, tmp_path / str(number))
        restore_outputs(before / "artifacts", attempt / "artifacts")
        assert 0 < len(metrics(attempt)) < OPTIONS["steps"]
    assert compare_artifacts(free, run_in(attempt)) == []


@pytest.mark.thorough
def test_killed_run_continues_its_episodes(tmp_path: Path) -> None:
    """Without a schedule, the resumed run keeps the tokens of unfinished episodes."""
    attempt = make_bundle(tmp_path / "0", make_job("rl", **OPTIONS))
    process = context.Process(target=run_in, args=(attempt,))
    process.start()
    while process.is_alive() and len(metrics(attempt)) < 5:
        time.sleep(0.01)
    process.kill()
    process.join()
    again = make_bundle(tmp_path / "1", make_job("rl", **OPTIONS))
    restore_outputs(attempt / "artifacts", again / "artifacts")
    run_in(again)
    assert [line["step"] for line in metrics(again)] == list(range(1, 9))
    assert compare_artifacts(again, run_in(following(again, tmp_path / "2"))) == []


def test_lost_rollout_process_does_not_stop_the_run(tmp_path: Path) -> None:
    bundle = make_bundle(
        tmp_path / "bundle",
        make_job("rl", **{**OPTIONS, "asynchronous": {"staleness": 1, "workers": 2}, "lora": {"rank": 4}}),
    )
    process = context.Process(target=run_in, args=(bundle,))
    process.start()
    while len(metrics(bundle)) < 2:
        time.sleep(0.01)
    children = [p for p in psutil.Process(process.pid).children() if "asynchronous" in "".join(p.cmdline())]
    assert len(children) == 2
    folder = Path(children[0].cmdline()[-1])
    assert folder.exists()
    children[0].kill()
    process.join()
    assert process.exitcode == 0
    assert not folder.exists()
    tasks = [
        task for step in range(1, 9) for task in set(episodes(bundle, f"step-{step:06d}.parquet").task_id)
    ]
    assert len(tasks) == len(set(tasks)) == 8 * 4
    assert [line["kind"] for line in read_json_lines(bundle / "runtime" / "events.jsonl")].count(
        "rollout_process_lost"
    ) == 1


def test_actor_keeps_weights_that_are_not_loaded_yet(tmp_path: Path) -> None:
    actor = object.__new__(_Actor)
    actor._folder, actor._lines = tmp_path, iter([b'{"settled": 1}', b'{"holds": 10}'])
    for version in (9, 10, 11):
        (tmp_path / f"weights-{version}.safetensors").touch()
    assert actor.receive() == (b'{"settled": 1}', b"")
    assert len(list(tmp_path.iterdir())) == 3
    assert actor.receive() == (b'{"holds": 10}', b"")
    assert [path.name for path in tmp_path.iterdir()] == ["weights-11.safetensors"]
