"""The tokenizer of a new model: bytes if a text of the recipe needs them, an error if it cannot encode."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from perilune.cli.train.plan import derive_plans, print_plan
from perilune.errors import RequestError
from perilune.models.text.tokenizer import Tokenizer
from perilune.recipe.load import bundled_recipes, load_recipe
from perilune.recipe.schema import Recipe, build_job
from perilune.recipe.tokenizers import find_foreign_character

ROWS = [{"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(60)]
RECIPE = """\
name: own
model: {model}
environment: {environment}
stages:
  - {{name: traces, task: collect, teacher: gold, traces: 8}}
  - {{name: sft, task: sft, data: traces, steps: 2, batch_size: 4{more}}}
"""
OWN_ENVIRONMENT = """\
from perilune.environments import Score, SingleTurn, Task

class Capitals(SingleTurn):
    id = "capitals"

    def __init__(self, section):
        pass

    def tasks(self, split, seed):
        yield Task(f"{split}-0", ({"role": "user", "content": "Greece?"},), {"answer": "Αθήνα"})

    def score(self, task, transcript):
        return Score(float(transcript.text == task.data["answer"]))
"""

SEVERAL_TURNS = """\
from perilune.environments import MultiTurn, Observation, Task

class Guess(MultiTurn):
    id, players, max_turns = "guess", 1, 2

    def __init__(self, section):
        pass

    def tasks(self, split, seed):
        yield Task(f"{split}-0", (), {})

    def play(self, task, rng):
        yield Observation(({"role": "user", "content": "→ your guess?"},))
        yield Observation(({"role": "user", "content": "again"},))
        return Observation(done=True, rewards=(1.0,))
"""


def loaded(
    folder: Path, rows: list[dict[str, Any]], model: str = "{preset: tiny}", more: str = "", **changes: Any
) -> Recipe:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = changes.get("environment", "{id: jsonl, path: rows.jsonl}")
    (folder / "own.yaml").write_text(RECIPE.format(model=model, environment=environment, more=more))
    return load_recipe(folder / "own.yaml")


def tokenizer(recipe: Recipe) -> str | None:
    assert recipe.model is not None
    return recipe.model.tokenizer


def test_printable_ascii_keeps_the_character_tokenizer(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, ROWS)
    assert tokenizer(recipe) is None
    model = build_job(recipe, recipe.stages[0]).model
    assert model["tokenizer"] is None


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Ποια είναι η πρωτεύουσα;", "answer": "x"},
        {"prompt": "capital?", "answer": "東京"},
        {"prompt": "a\tb", "answer": "a tab is ASCII, and not printable"},
    ],
)
def test_single_non_ascii_row_selects_bytes(row: dict[str, Any], tmp_path: Path) -> None:
    recipe = loaded(tmp_path, [*ROWS, row])
    assert tokenizer(recipe) == "bytes"
    assert f"{tmp_path / 'rows.jsonl'}:61" in (find_foreign_character(recipe) or "")


def test_non_ascii_answers_of_an_environment_select_bytes(tmp_path: Path) -> None:
    (tmp_path / "capitals.py").write_text(OWN_ENVIRONMENT)
    recipe = loaded(tmp_path, ROWS, environment="{id: 'capitals.py:Capitals'}")
    assert tokenizer(recipe) == "bytes"
    expected = "characters has no token for 'Α' in capitals, training task 1, message of the assistant"
    assert find_foreign_character(recipe) == expected
    print_plan(recipe, derive_plans(recipe), out := StringIO())
    assert f"tokenizer: bytes; {expected}" in out.getvalue()


@pytest.mark.parametrize(
    "changes",
    [
        {"more": ", environment: {path: greek.jsonl}"},
        {"more": ", eval: {tasks: 1, sets: {other: {path: greek.jsonl}}}"},
        {"environment": "{id: mixture, parts: {a: {id: jsonl, path: rows.jsonl},"
         " b: {id: jsonl, path: greek.jsonl, weight: 0}}}"},
    ],
)  # fmt: skip
def test_non_ascii_text_of_any_environment_selects_bytes(changes: dict[str, str], tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} συν ένα;", "answer": str(n + 1)} for n in range(60)]
    (tmp_path / "greek.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = loaded(tmp_path, ROWS, **changes)
    assert tokenizer(recipe) == "bytes"
    assert "greek.jsonl:1" in (find_foreign_character(recipe) or "")


def test_explicit_character_tokenizer_is_refused_for_non_ascii_text(tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": "ναι;", "answer": "ναι"}]
    with pytest.raises(RequestError, match=r"no token for 'ν' in .*rows.jsonl:61") as caught:
        loaded(tmp_path, rows, "{preset: tiny, tokenizer: characters}")
    assert caught.value.where.endswith("own.yaml:2") and "bytes or bpe" in caught.value.remedy


def test_plan_refuses_a_model_whose_tokenizer_lacks_characters(tmp_path: Path) -> None:
    from perilune.models.checkpoints.loading import new_model, save_checkpoint

    characters = Tokenizer.characters()
    save_checkpoint(tmp_path / "mine", new_model("tiny", characters, 0), characters)
    rows = [*ROWS, {"prompt": "ναι;", "answer": "ναι"}]
    recipe = loaded(tmp_path, rows, "{path: mine}")
    with pytest.raises(RequestError, match=r"no token for 'ν' in .*rows.jsonl:61"):
        derive_plans(recipe, check=True)
    derive_plans(loaded(tmp_path, ROWS, "{path: mine}"), check=True)


def test_first_turn_of_a_multi_turn_environment_is_checked(tmp_path: Path) -> None:
    (tmp_path / "guess.py").write_text(SEVERAL_TURNS)
    recipe = loaded(tmp_path, ROWS, environment="{id: 'guess.py:Guess'}")
    message = find_foreign_character(recipe) or ""
    assert "no token for '→' in guess, training task 1, message of the user" in message


def test_plan_checks_more_tasks_than_loading(tmp_path: Path) -> None:
    late = OWN_ENVIRONMENT.replace('"Αθήνα"', '"Αθήνα" if number == 20 else "Athens"').replace(
        "-0", "-{number}"
    )
    (tmp_path / "capitals.py").write_text(
        late.replace("        yield Task", "        for number in range(60):\n            yield Task")
    )
    recipe = loaded(tmp_path, ROWS, environment="{id: 'capitals.py:Capitals'}")
    assert tokenizer(recipe) is None
    with pytest.raises(RequestError, match="no token for 'Α' in capitals, training task 21"):
        derive_plans(recipe, check=True)


def test_plan_refuses_teacher_answers_that_the_tokenizer_lacks(tmp_path: Path) -> None:
    (tmp_path / "teacher.py").write_text(
        "from perilune.data.generators.scripted import ScriptedTeacher\n"
        "class Cheerful(ScriptedTeacher):\n"
        "    name = 'cheerful'\n"
        "    strategies = {'direct': 1.0}\n"
        "    def script(self, task, strategy, chance):\n"
        "        return [task.data['answer'] + ' ✓']\n"
    )
    loaded(tmp_path, ROWS)
    recipe = load_recipe(tmp_path / "own.yaml", [f"traces.teacher={tmp_path}/teacher.py:Cheerful"])
    with pytest.raises(RequestError, match="no token for '✓' in the teacher's answers") as caught:
        derive_plans(recipe, check=True)
    assert "bytes" in caught.value.remedy


def test_bpe_is_refused_in_stages_without_data(tmp_path: Path) -> None:
    bpe = "{preset: tiny, tokenizer: bpe}"
    recipe = loaded(tmp_path, ROWS, bpe)
    derive_plans(recipe)
    assert recipe.model is not None and recipe.model.vocab_size == 2048
    text = (tmp_path / "own.yaml").read_text()
    for stage in (
        "{name: new, task: new_model, preset: tiny}",
        "{name: new, task: evaluate, checkpoint: model}",
    ):
        (tmp_path / "own.yaml").write_text(f"{text}  - {stage}\n")
        with pytest.raises(RequestError, match="this stage has none") as caught:
            derive_plans(load_recipe(tmp_path / "own.yaml"))
        assert caught.value.where == "stages.new: model.tokenizer"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{preset: tiny, vocab_size: 1024}", "vocab_size is for tokenizer: bpe"),
        ("{preset: tiny, tokenizer: bpe, vocab_size: 99}", "vocab_size"),
        ("{path: here, tokenizer: bpe}", "tokenizer is for a new model"),
    ],
)
def test_misplaced_tokenizer_options_are_refused(model: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        loaded(tmp_path, ROWS, model)


def test_bundled_recipes_keep_the_default_tokenizer() -> None:
    for name in bundled_recipes():
        if "/" not in name:
            recipe = load_recipe(name)
            assert recipe.model is None or recipe.model.tokenizer is None, name
