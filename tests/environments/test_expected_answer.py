"""The right answers that episodes record, for people who read them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from environment_cases import gym

from perilune.environments import make_environment
from perilune.environments.core.protocol import Task
from perilune.environments.core.reference_answer import expected_answer

SUMS = gym("basic_arithmetic", prompt="compact")
BORROWED: dict[str, Any] = {"tasks": {"id": "oolong", "style": "compact", "lengths": [16]}}


def first_task(environment: Any) -> Task:
    return next(iter(environment.tasks("train", 0)))


@pytest.mark.parametrize(
    "section",
    [
        gym("chain_sum"),
        gym("chain_sum", prompting={"format": "boxed"}),
        {"id": "mixture", "parts": {"sums": gym("chain_sum", prompting={"format": "boxed"})}},
        {"id": "calculator"},
    ],
)
def test_expected_answer_is_that_of_the_task_without_its_format(section: dict[str, Any]) -> None:
    environment = make_environment(section)
    task = first_task(environment)
    assert expected_answer(environment, task) == task.data["answer"] != ""
    assert all(task.data["answer"] not in message["content"].split() for message in task.prompt[1:])


def test_expected_answer_of_borrowed_tasks_is_that_of_their_environment(tmp_path: Path) -> None:
    (tmp_path / "agent.py").touch()
    lender = make_environment(BORROWED["tasks"])
    stated = expected_answer(lender, first_task(lender))
    assert stated
    program = {"id": "program", "command": ["python3", "{file}"], "file": str(tmp_path / "agent.py")}
    for section in ({"id": "recursive", "prompt": "compact"}, program):
        environment = make_environment(section | BORROWED)
        task = first_task(environment)
        assert expected_answer(environment, task) == stated
        environment.close()


def test_expected_answer_is_empty_where_the_environment_states_none() -> None:
    environment = make_environment(gym("chain_sum"))
    assert expected_answer(environment, Task("1", (), {"answer": None})) == ""
    assert expected_answer(cast("Any", SimpleNamespace(max_turns=4)), Task("1", (), {})) == ""


@pytest.mark.parametrize("section", [{"id": "planning_repair"}, {"id": "wide_lookup", "keys": [2]}])
def test_expected_answer_of_several_turns_is_what_gold_does(section: dict[str, Any]) -> None:
    environment = make_environment(section)
    task = first_task(environment)
    assert "answer" not in task.data
    stated = expected_answer(environment, task)
    assert stated.splitlines()[-1] == environment.gold(task).text.splitlines()[-1]
    assert environment.score(task, environment.gold(task)).reward == 1.0
