"""The conformance suite passes correct environments and finds each broken rule."""

import json

import pytest
from typer.testing import CliRunner

from perilune.cli.data.environments import app
from perilune.environments import Task
from perilune.errors import RequestError, WorkFailedError
from perilune.verifiers import ScorerLimits
from perilune.verifiers.conformance import check_environment

CHECKS = 12  # checks that the suite makes


def broken(name):
    return {"id": "factory", "factory": f"broken_environments:{name}"}


@pytest.mark.parametrize(
    "section",
    [
        {"id": "calculator"},
        {"id": "reasoning_gym", "task": "chain_sum", "prompt": "compact"},
        broken("Sound"),
        broken("TwoPlayers"),
    ],
    ids=lambda section: "-".join(map(str, section.values())),
)
def test_check_environment_passes_correct_environments(section):
    report = check_environment(section, tasks=2)
    assert report.findings == []
    assert len(report.checked) >= CHECKS - 1


@pytest.mark.parametrize(
    ("name", "checks"),
    [
        ("Unseeded", {"the same seed gives the same episode"}),
        ("OtherTasks", {"the same seed gives the same tasks"}),
        ("SameTask", {"tasks are distinct"}),
        ("Leaky", {"no task is in both splits"}),
        ("NoTasks", {"there are tasks"}),
        ("Tuples", {"a task's data survives JSON"}),
        ("Sets", {"a task's data survives JSON"}),
        ("NoGenerator", {"nothing fails"}),
        ("Costly", {"invalid actions pay no more than legal ones"}),
        ("WrongGold", {"the gold answer is accepted"}),
        ("Generous", {"worthless texts are refused"}),
        ("Miserly", {"score equals the sum of the steps"}),
        ("Endless", {"an episode ends within max_turns"}),
        ("Raising", {"nothing fails"}),
        ("NoSecondClose", {"close may be called again"}),
    ],
)
def test_check_environment_finds_each_broken_rule_and_no_other(name, checks):
    report = check_environment(broken(name), tasks=1, limits=ScorerLimits(item_seconds=2.0))
    assert {finding.check for finding in report.findings} == checks


def test_check_environment_plays_a_task_until_its_first_failure():
    report = check_environment(broken("Raising"), tasks=2)
    assert report.checked["nothing fails"] == len(report.findings) == 2


def test_task_rejects_text_as_prompt_and_number_as_id():
    with pytest.raises(RequestError, match="a text, not messages"):
        Task("a", "what?", {})
    with pytest.raises(RequestError, match="the id of task 7 is not a text"):
        Task(7, ({"role": "user", "content": "what?"},), {})


def test_check_command_lists_checks_and_fails_on_findings():
    result = CliRunner().invoke(
        app, ["check", "calculator", "--tasks", "1", "--json"], catch_exceptions=False
    )
    document = json.loads(result.output)
    assert document["findings"] == [] and len(document["checked"]) == CHECKS
    with pytest.raises(WorkFailedError, match="breaks 1 of the") as caught:
        CliRunner().invoke(
            app,
            ["check", "factory", "--set", "factory=broken_environments:Generous", "--tasks", "1"],
            catch_exceptions=False,
        )
    assert caught.value.where == "worthless texts are refused"
    arguments = [
        "check",
        "factory",
        "--set",
        "factory=broken_environments:Generous",
        "--tasks",
        "1",
        "--json",
    ]
    result = CliRunner().invoke(app, arguments)
    assert json.loads(result.stdout)["findings"] and "a line that" in result.stderr


def test_sample_command_shows_every_turn_of_episode():
    text = CliRunner().invoke(app, ["sample", "calculator", "-n", "1", "--set", "products=2"]).output
    lines = [line.split()[0] for line in text.splitlines()[1:]]
    assert lines == ["prompt", *["assistant", "tool"] * 4, "answer"] and "scores 1.0" in text
    assert "1 player, at most 6 turns" in CliRunner().invoke(app, ["show", "calculator"]).output
