"""Training tasks: finite task sets repeat in a new order each epoch."""

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from task_cases import DIGITS, make_bundle, make_job, metrics, run_task
from task_environments import Digits

from perilune.bundle.workspace import Workspace
from perilune.errors import RequestError
from perilune.files import read_json_lines
from perilune.tasks.stage.training_tasks import TrainingTasks

FEW = {**DIGITS, "limit": 16}


def training_tasks(
    root: Path, skip: int = 0, environment: dict[str, object] = FEW, seed: int = 1
) -> TrainingTasks:
    workspace = Workspace(make_bundle(root, make_job("rl", environment=environment, seed=seed)))
    return TrainingTasks(Digits(environment), workspace, skip)


def ids(tasks: TrainingTasks, size: int) -> list[str]:
    return [task.task_id for task in tasks.take(size)]


def test_every_epoch_has_every_task_once_in_a_new_order(tmp_path: Path) -> None:
    own = [task.task_id for task in Digits(FEW).tasks("train", 1)]
    size = len(own)
    drawn = ids(training_tasks(tmp_path / "a"), 4 * size)
    epochs = [drawn[start : start + size] for start in range(0, 4 * size, size)]
    assert epochs[0] == own and all(sorted(epoch) == sorted(own) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert ids(training_tasks(tmp_path / "b"), 4 * size) == drawn
    assert ids(training_tasks(tmp_path / "c", seed=2), 4 * size)[size:] != drawn[size:]


@pytest.mark.parametrize("skip", [0, 3, 11, 12, 13, 40])
def test_resumed_run_continues_with_the_same_tasks(tmp_path: Path, skip: int) -> None:
    whole = training_tasks(tmp_path / "whole")
    drawn = ids(whole, skip + 20)
    resumed = training_tasks(tmp_path / "resumed", skip)
    assert ids(resumed, 20) == drawn[skip:] and resumed.epoch == whole.epoch


def test_large_task_set_is_read_lazily(tmp_path: Path) -> None:
    endless = {**DIGITS, "limit": 10**12}
    tasks = training_tasks(tmp_path, environment=endless)
    assert ids(tasks, 100) == [task.task_id for task in islice(Digits(endless).tasks("train", 1), 100)]
    assert tasks.epoch == 0


def test_environment_without_training_tasks_is_a_request_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no training tasks"):
        training_tasks(tmp_path, environment={**DIGITS, "limit": 0}).take(1)


def test_epochs_are_recorded_in_metrics_and_events(tmp_path: Path) -> None:
    bundle = run_task(tmp_path, "rl", environment=FEW, steps=8)
    size = len(list(Digits(FEW).tasks("train", 1)))
    expected = [(4 * step - 1) // size for step in range(1, 9)]
    assert [line["epoch"] for line in metrics(bundle)] == expected and max(expected) >= 2
    happened = [e for e in read_json_lines(bundle / "runtime" / "events.jsonl") if e["kind"] == "epoch"]
    assert Counter((event["epoch"], event["tasks"]) for event in happened) == {
        (epoch, size): 1 for epoch in range(1, max(expected) + 1)
    }
