"""The command `perilune environments`."""

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perilune.cli.data.environments import app
from perilune.errors import RequestError
from perilune.models.text.tokenizer import Tokenizer
from perilune.plan.checks import MAX_COUNTED_TASKS

ECHO = """\
from pydantic import BaseModel, Field
from perilune.environments import Score, SingleTurn, Task

class Spec(BaseModel):
    numbers: int = Field(3, description="how many")

class Echo(SingleTurn):
    Spec = Spec
    id = "echo"
    def __init__(self, spec):
        self.spec = spec
    def tasks(self, split, seed):
        yield Task(split, ({"role": "user", "content": "7?"},), {"answer": "7"})
    def score(self, task, transcript):
        return Score(float(transcript.text == task.data["answer"]))
"""
TURNS = "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '\n' }}{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}[assistant]{% endif %}"


def run(*arguments):
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_list_names_every_family_and_its_compact_prompt():
    rows = {row["name"]: row["compact_prompt"] for row in json.loads(run("list", "--json"))}
    assert len(rows) > 100
    assert rows["reasoning_gym/chain_sum"] and not rows["reasoning_gym/sudoku"]
    assert "reasoning_gym/chain_sum  (compact)" in run("list", "reasoning_gym").splitlines()


def test_list_counts_families_and_games_or_names_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena.envs.registration", None)  # importing it takes seconds
    lines = run("list").splitlines()
    for name, kind, least in (
        ("open_spiel", "games", 60),
        ("textarena", "games", 60),
        ("reasoning_gym", "families", 90),
    ):
        (line,) = (line for line in lines if line.startswith(f"{name} "))
        counted = re.search(rf"\. (\d+) {kind}\b", line)
        assert counted and int(counted[1]) > least
    assert any(line.startswith("calculator  ") and line.endswith(".") for line in lines)
    assert lines[-1].endswith("perilune environments list NAME")
    assert "open_spiel/tic_tac_toe" in run("list", "open_spiel").splitlines()
    assert {"name": "textarena/Nim-v0", "compact_prompt": False, "missing": None} in json.loads(
        run("list", "textarena", "--json")
    )
    monkeypatch.setitem(sys.modules, "textarena", None)
    assert any(line.startswith("textarena") and "not installed" in line for line in run("list").splitlines())
    with pytest.raises(RequestError):
        run("list", "monopoly")


def test_show_and_sample_accept_names_of_games():
    assert "2 players, at most 9 turns" in run("show", "open_spiel/tic_tac_toe")
    assert "TicTacToe-v0" in run("show", "textarena/TicTacToe-v0")
    assert "Walk from S to G" in run("sample", "gymnasium/FrozenLake-v1", "-n", "1")


def test_show_prints_fields_and_settings_with_defaults():
    document = json.loads(run("show", "reasoning_gym/chain_sum", "--json"))
    assert document["config"]["max_digits"] == 4
    assert document["fields"]["threshold"]["default"] == 1.0 and document["fields"]["task"]["required"]
    assert "config.max_digits: 4" in run("show", "reasoning_gym/chain_sum")
    assert json.loads(run("show", "reasoning_gym", "--json"))["config"] == {}


def test_sample_prints_tasks_and_scores_of_answers():
    command = ("sample", "reasoning_gym/chain_sum", "--set", "prompt=compact", "--set", "config.max_terms=2")
    document = json.loads(run(*command, "-n", "3", "--split", "heldout", "--seed", "7", "--json"))
    assert [task["score"] for task in document["tasks"]] == [1.0] * 3
    assert all(task["prompt"].endswith("=") for task in document["tasks"])
    assert document == json.loads(run(*command, "-n", "3", "--split", "heldout", "--seed", "7", "--json"))
    text = run(*command, "-n", "1")
    assert "scores 1.0" in text and "difficulty" in text


def test_show_and_sample_work_for_environment_in_local_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    monkeypatch.chdir(tmp_path)
    text = run("show", "echo.py:Echo")
    assert 'environment: {"id": "echo.py:Echo"}' in text and "how many" in text
    assert "def score" not in text and "tasks:" not in text
    assert "  heldout tasks: 1\n" in run("show", "echo.py:Echo", "--set", "numbers=2", "--count")
    counted = json.loads(run("show", "calculator", "--count", "--json"))["tasks"]
    assert counted["train"] == MAX_COUNTED_TASKS
    assert "answer  7   scores 1.0" in run("sample", "echo.py:Echo", "-n", "1")


def test_sample_accepts_bundled_recipe():
    assert "scores 1.0" in run("sample", "quickstart", "-n", "1")


def test_sample_prints_family_without_stated_answer():
    assert "(none stated)" in run("sample", "reasoning_gym/graph_color", "-n", "1")


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (("sample", "nope/x"), "environment.id"),
        (("show", "reasoning_gym/chainsum"), "environment.task"),
        (("sample", "reasoning_gym/chain_sum", "--set", "config.max=1"), "environment.config.max"),
        (("sample", "reasoning_gym/chain_sum", "--set", "prompt"), "--set"),
        (("sample", "reasoning_gym/chain_sum", "--set", "task.x=1"), "--set task.x=1"),
        (("sample", "reasoning_gym/chain_sum", "--set", "config=[1"), "--set"),
    ],
)
def test_commands_name_place_of_invalid_argument(arguments, where):
    with pytest.raises(RequestError) as caught:
        run(*arguments)
    assert caught.value.where == where


def test_sample_rejects_unknown_split():
    result = CliRunner().invoke(app, ("sample", "reasoning_gym/chain_sum", "--split", "test"))
    assert result.exit_code == 2 and "'test' is not one of 'train', 'heldout'" in result.output


def test_show_names_teacher_of_each_game():
    assert "    kuhn_poker     cfr: CFR+" in run("show", "open_spiel")
    assert json.loads(run("show", "open_spiel", "--json"))["notes"]["teachers"]["hex"].startswith("mcts")


def test_sample_prints_prompt_as_tokens_of_model(tmp_path):
    recipe = tmp_path / "ask.yaml"
    recipe.write_text(
        "name: ask\nmodel: {preset: tiny}\n"
        "environment: {id: reasoning_gym, task: chain_sum, prompting: {system: Add., format: boxed}}\n"
        "stages: [{name: before, task: evaluate, checkpoint: model}]\n"
    )
    document = json.loads(run("sample", str(recipe), "-n", "1", "--json"))
    assert document["template"] == {"system": "in the user's turn", "default_system": ""}
    (task,) = document["tasks"]
    assert "".join(token["text"] for token in task["tokens"]).startswith("Add.State the final answer")
    assert task["assistant_turn"] == len(task["tokens"])
    assert task["answer"].startswith("\\boxed{") and task["score"] == 1.0
    Tokenizer.characters().with_chat_template(TEMPLATE, where="test").save(tmp_path)
    text = run("sample", "calculator", "-n", "1", "--model", str(tmp_path))
    assert "a system prompt becomes a turn of its own" in text
    assert "the assistant's turn begins at token" in text
    assert text.count(":␣") == 0 and "\\n" in text
