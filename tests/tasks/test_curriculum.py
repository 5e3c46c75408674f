"""Curriculum by pass rate: inclusion probabilities, draws, and importance weights."""

import itertools
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import context
from task_cases import (
    DIGITS,
    episodes,
    figures_of,
    make_bundle,
    make_job,
    metrics,
    run_in,
    run_on_a_slow_disk,
    run_task,
)

from perilune.bundle.compare import compare_artifacts
from perilune.environments import Task
from perilune.environments.core.registry import make_environment
from perilune.execution.placements.local import restore_outputs
from perilune.files import read_json_lines
from perilune.tasks.rl.curriculum import (
    PROBABILITY,
    Curriculum,
    inclusion_probabilities,
    systematic_sample,
)
from perilune.tasks.rl.curriculum_settings import CurriculumSettings
from perilune.tasks.rl.spec import RLSpec

ENDS = {**DIGITS, "factory": "task_environments:Ends"}
TALK = {"id": "factory", "factory": "task_environments:Talk"}
MIXTURE = {"id": "mixture", "parts": {"ends": {**ENDS, "weight": 2}, "talk": {**TALK, "limit": 9}}}


def pool(size: int = 12) -> list[Task]:
    return [Task(str(n), ({"role": "user", "content": str(n)},), {}, difficulty=n % 3) for n in range(size)]


def test_inclusion_probabilities_are_proportional_and_at_most_one() -> None:
    assert inclusion_probabilities(np.array([1.0, 1, 2]), 2).tolist() == [0.5, 0.5, 1.0]
    # 3 * 8/10 is above 1, so that task is certain and the others share the two left.
    assert inclusion_probabilities(np.array([8.0, 1, 1]), 2).tolist() == [1.0, 0.5, 0.5]
    assert inclusion_probabilities(np.array([9.0, 4, 1, 1]), 3).tolist() == [1.0, 1.0, 0.5, 0.5]
    assert inclusion_probabilities(np.ones(3), 3).tolist() == [1.0, 1.0, 1.0]


def test_systematic_sample_draws_each_task_with_its_probability() -> None:
    """Over an even grid of start values, the share of draws with a task equals its probability."""
    probabilities = inclusion_probabilities(np.array([0.1, 1.0, 0.4, 0.25, 0.9, 0.35]), 3)
    times = np.zeros(6)
    for start in (np.arange(5000) + 0.5) / 5000:
        drawn = systematic_sample(probabilities, float(start))
        assert len(drawn) == len(set(drawn)) == 3
        times[drawn] += 1
    assert times / 5000 == pytest.approx(probabilities, abs=2e-4)


def curriculum(counts: dict[str, list[float]], **settings: Any) -> Curriculum:
    return Curriculum(CurriculumSettings(**settings), make_environment(ENDS), 0, counts)


def test_strata_with_medium_pass_rates_are_drawn_more_often() -> None:
    counts = {"digits 0": [0.0, 80.0], "digits 1": [40.0, 80.0], "digits 2": [80.0, 80.0]}
    drawn = curriculum(counts, candidates=3, floor=0.1).draw(pool(), 4, 1)
    by_level = {int(task.difficulty or 0): probability for task, probability in drawn}
    # E[p (1 - p)] under Beta(1, 81) is 81 / (82 * 83); 4 of it and the floor make the weight.
    low = 0.1 + 0.9 * 4 * 81 / (82 * 83)
    high = 0.1 + 0.9 * 4 * 41 * 41 / (82 * 83)
    assert by_level[1] == pytest.approx(4 * high / (8 * low + 4 * high))
    every = [curriculum(counts, floor=0.1).draw(pool(), 4, step) for step in range(300)]
    levels = [int(task.difficulty or 0) for step in every for task, _ in step]
    assert levels.count(1) / len(levels) == pytest.approx(by_level[1], abs=0.05)
    assert min(levels.count(0), levels.count(2)) > 0  # the floor keeps every task possible
    uniform = curriculum(counts, floor=1.0).draw(pool(), 4, 1)
    assert [probability for _, probability in uniform] == pytest.approx([1 / 3] * 4)


def test_importance_weighted_estimates_are_unbiased() -> None:
    """The mean over draws of sum y / probability equals the sum over the pool, for any counts."""
    counts = {"digits 0": [1.0, 60.0], "digits 1": [30.0, 60.0]}
    tasks = pool()
    value = {task.task_id: float(n) ** 2 for n, task in enumerate(tasks)}
    estimates = [
        sum(
            value[task.task_id] / probability for task, probability in curriculum(counts).draw(tasks, 4, step)
        )
        for step in range(4000)
    ]
    error = np.std(estimates) / np.sqrt(len(estimates))
    assert abs(np.mean(estimates) - sum(value.values())) < 4 * error


def test_counts_decay_and_are_dropped(tmp_path: Path) -> None:
    counts = {"digits 0": [2.0, 4.0], "digits 7": [0.0, 0.01]}
    curriculum(counts, decay=0.5).observe({}, [])
    assert counts == {"digits 0": [1.0, 2.0]}


def test_rl_logs_the_probability_of_every_task(tmp_path: Path) -> None:
    bundle = run_task(tmp_path, "rl", environment=ENDS, steps=6, curriculum={"candidates": 3})
    table = episodes(bundle)
    probabilities = [figures_of(row)[PROBABILITY] for row in table["metrics"]]
    assert all(0 < p <= 1 for p in probabilities)
    for _, group in table.groupby("group_id"):
        assert len({figures_of(row)[PROBABILITY] for row in group["metrics"]}) == 1
    lines = metrics(bundle)
    # At first all tasks are equally likely, so the uniform figures equal the plain figures.
    assert probabilities[:16] == pytest.approx([1 / 3] * 16)
    assert lines[0]["uniform/reward"] == pytest.approx(lines[0]["reward"])
    assert lines[0]["uniform/ess"] == pytest.approx(1.0)
    assert len({round(p, 6) for p in probabilities}) > 2
    assert len(set(table["task_id"])) == 24, "a task came twice"


def test_importance_weights_restore_the_uniform_gradient(tmp_path: Path) -> None:
    """With equally likely tasks all weights are 1, and training is unchanged."""
    uniform = {"floor": 1.0, "candidates": 2}
    plain = run_task(tmp_path / "a", "rl", environment=ENDS, curriculum=uniform)
    weighted = run_task(
        tmp_path / "b", "rl", environment=ENDS, curriculum={**uniform, "importance_weight": True}
    )
    assert compare_artifacts(plain, weighted) == []
    options: dict[str, Any] = {"environment": ENDS, "steps": 6}
    sharp: dict[str, Any] = {"floor": 0.01}
    first = run_task(tmp_path / "c", "rl", **options, curriculum=sharp)
    second = run_task(tmp_path / "d", "rl", **options, curriculum={**sharp, "importance_weight": True})
    assert metrics(first)[0] == metrics(second)[0] and metrics(first)[-1] != metrics(second)[-1]


def test_importance_weights_and_refills_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="drops dead groups"):
        RLSpec(checkpoint="model", algorithm="dapo", curriculum={"importance_weight": True})


@pytest.mark.thorough
@pytest.mark.slow
def test_killed_run_resumes_with_the_same_draws(tmp_path: Path) -> None:
    """SIGKILL and resume on a mixture of single-turn and multi-turn tasks: equal to the byte."""
    options: dict[str, Any] = {
        "environment": MIXTURE, "steps": 12, "save_every": 3, "keep": {"optimizer": True},
        "curriculum": {"by": "environment"},
    }  # fmt: skip
    whole = run_task(tmp_path / "whole", "rl", **options)
    job = make_job("rl", **options)
    first = make_bundle(tmp_path / "1", job)
    process = context.Process(target=run_on_a_slow_disk, args=(first,))
    process.start()
    lines = first / "artifacts" / "metrics.jsonl"
    while process.is_alive() and not (lines.exists() and lines.read_bytes().count(b"\n") >= 7):
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    second = make_bundle(tmp_path / "2", job)
    restore_outputs(first / "artifacts", second / "artifacts")
    run_in(second)
    events = read_json_lines(second / "runtime" / "events.jsonl")
    assert next(event["step"] for event in events if event["kind"] == "resumed") >= 6
    assert compare_artifacts(whole, second) == []
    line = metrics(second)[-1]
    groups = {name: line.get(f"environment/{name}/groups", 0) for name in ("ends", "talk")}
    assert sum(groups.values()) == line["groups"] == 4
    assert set(itertools.chain(*(step for step in metrics(second)))) >= {
        "environment/talk/pass_rate", "environment/ends/reward", "environment/ends/dead_groups",
    }  # fmt: skip
