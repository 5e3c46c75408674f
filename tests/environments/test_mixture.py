"""A mixture of environments: its tasks behave as they do in the single environments."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from environment_cases import gym

from perilune.environments import (
    EpisodeGenerator,
    KeyedRandom,
    MultiTurn,
    Outcome,
    Score,
    SingleTurn,
    Split,
    Task,
    Transcript,
    ask,
    end_episode,
    make_environment,
)
from perilune.environments.core.mixture import environment_name, find_part
from perilune.environments.core.registry import file_fields, part_sections
from perilune.errors import RequestError
from perilune.verifiers import Scorer

SUMS = gym("chain_sum", prompt="compact")
LETTERS = gym("letter_counting")


class Guess(MultiTurn):
    """Guess a digit in two turns. A correct guess earns 1/2 in each turn."""

    id, max_turns = "guess", 2

    def __init__(self, section: Mapping[str, Any]) -> None:
        self.players = section.get("players", 1)
        self.confined = section.get("confined", True)

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        for number in range(10):
            yield Task(f"{split}{number}", ({"role": "user", "content": "?"},), {"number": number})

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        action = yield ask(f"luck {rng.integer(1000, 'luck')}")
        right = float(action == str(task.data["number"]))
        action = yield ask("again", rewards=(right / 2,))
        yield end_episode(float(action == str(task.data["number"])) / 2, metrics={"turns": 2.0})


class Echo(SingleTurn):
    """Rewards repeating the question with 1, and sets the metric `gold` itself."""

    id = "echo"

    def __init__(self, section: Mapping[str, Any]) -> None:
        self.section = dict(section)

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        yield Task("a", ({"role": "user", "content": "a"},), {})

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        return Score(float(transcript.text == "a"), {"copied": 1.0}, {"gold": 0.25})


GUESS = {"id": "factory", "factory": "test_mixture:Guess"}
ECHO = {"id": "factory", "factory": "test_mixture:Echo"}


def mixture(**parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": "mixture", "parts": {name: dict(part) for name, part in parts.items()}}


def part_names(section: Mapping[str, Any], count: int, split: Split = "train", seed: int = 3) -> list[str]:
    tasks = make_environment(section).tasks(split, seed)
    return [task.task_id.partition("/")[0] for task in islice(tasks, count)]


def test_shares_follow_weights_and_temperature() -> None:
    section = mixture(a={**SUMS, "weight": 1}, b={**LETTERS, "weight": 4})
    assert make_environment(section).shares == pytest.approx({"a": 0.2, "b": 0.8})
    assert make_environment({**section, "temperature": 2}).shares == pytest.approx({"a": 1 / 3, "b": 2 / 3})
    counts = Counter(part_names(section, 1000))
    assert 150 < counts["a"] < 250 and counts["b"] == 1000 - counts["a"]


def test_part_of_task_depends_only_on_seed_and_number() -> None:
    section = mixture(a=SUMS, b=LETTERS)
    names = part_names(section, 60)
    assert part_names(section, 60) == names != part_names(section, 60, seed=4)
    harder = {**SUMS, "config": {"min_terms": 5, "max_terms": 5}}
    assert part_names(mixture(a=harder, b=LETTERS), 60) == names


def test_mixture_task_equals_task_of_part_except_id_prefix() -> None:
    environment = make_environment(mixture(a=SUMS, b=LETTERS))
    for name, section in (("a", SUMS), ("b", LETTERS)):
        own = make_environment(section)
        alone = list(islice(own.tasks("train", 3), 5))
        mixed = [
            task for task in islice(environment.tasks("train", 3), 60) if task.task_id.startswith(f"{name}/")
        ]
        for task, expected in zip(mixed, alone, strict=False):
            assert task.task_id == f"{name}/{expected.task_id}"
            assert (task.prompt, task.data, task.difficulty) == (
                expected.prompt, expected.data, expected.difficulty,
            )  # fmt: skip
            gold = environment.gold(task)
            assert gold == own.gold(expected)
            assert environment.score(task, gold) == own.score(expected, gold)
            assert environment.is_right(task, gold) is own.is_right(expected, gold)
            assert environment.reference_answer(task) == own.reference_answer(expected)
            assert environment_name(environment, task) == f"mixture/{name}"
            assert find_part(environment, task).id == own.id and find_part(own, expected) is own


def test_finite_part_repeats_no_task_within_epoch() -> None:
    environment = make_environment(mixture(guess=GUESS, sums=SUMS))
    ids = [task.task_id for task in islice(environment.tasks("train", 0), 120)]
    guesses = [name for name in ids if name.startswith("guess/")][:40]
    epochs = [guesses[start : start + 10] for start in range(0, 40, 10)]
    assert all(len(set(epoch)) == 10 for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) == 4
    sums = [name for name in ids if name.startswith("sums/")]
    assert len(set(sums)) == len(sums)


def test_heldout_tasks_alternate_between_parts() -> None:
    section = mixture(guess={**GUESS, "weight": 0}, sums=SUMS)
    assert "guess" not in part_names(section, 100)
    assert part_names(section, 6, "heldout") == ["guess", "sums"] * 3
    names = part_names(section, 50, "heldout")
    assert names[:20] == ["guess", "sums"] * 10 and set(names[20:]) == {"sums"}


def test_reward_scale_changes_reward_and_keeps_gold_metric() -> None:
    section = mixture(sums={**SUMS, "reward_scale": 0.5}, echo=ECHO, guess={**GUESS, "reward_scale": 3})
    environment = make_environment(section)
    tasks = {task.task_id.partition("/")[0]: task for task in islice(environment.tasks("train", 0), 30)}
    right = environment.score(tasks["sums"], environment.gold(tasks["sums"]))
    assert right.reward == 0.5 and right.metrics["gold"] == 1.0 and right.terms["raw"] == 1.0
    echoed = environment.score(tasks["echo"], Transcript("a"))
    assert echoed.reward == 1.0 and echoed.metrics["gold"] == 0.25  # the part's own gold score stays
    number = str(tasks["guess"].data["number"])
    session = environment.reset(tasks["guess"], 7)
    assert session.step(number).rewards == (1.5,)
    last = session.step(number)
    assert last.rewards == (1.5,) and last.metrics == {"gold": 1.0, "turns": 2.0}
    assert environment.score(tasks["guess"], Transcript(number, earlier=(number,))).reward == 3.0
    plain = make_environment(mixture(sums=SUMS, guess=GUESS))
    assert "gold" not in plain.score(tasks["sums"], Transcript("x")).metrics


def test_mixture_session_matches_session_of_part() -> None:
    environment, own = make_environment(mixture(guess=GUESS, sums=SUMS)), make_environment(GUESS)
    assert environment.max_turns == 2
    task = next(task for task in environment.tasks("train", 0) if task.task_id.startswith("guess/"))
    alone = next(iter(own.tasks("train", 0)))
    assert environment.reset(task, 5).observation == own.reset(alone, 5).observation


def test_each_part_uses_own_prompting_and_rewards() -> None:
    asked = {"format": "boxed", "system": "Count.", "stop": ["}"]}
    section = mixture(
        sums={**SUMS, "rewards": {"verifier": 2.0, "well_formed": 0.5}},
        letters={**LETTERS, "prompting": asked},
    )
    environment = make_environment(section)
    tasks = {task.task_id.partition("/")[0]: task for task in islice(environment.tasks("train", 0), 20)}
    assert tasks["letters"].prompt[0] == {"role": "system", "content": "Count."}
    assert "boxed" in tasks["letters"].prompt[-1]["content"]
    assert find_part(environment, tasks["letters"]).stop_texts == ("}",)
    assert not getattr(find_part(environment, tasks["sums"]), "stop_texts", ())
    assert environment.gold(tasks["letters"]).text.startswith("\\boxed{")
    scored = environment.score(tasks["sums"], environment.gold(tasks["sums"]))
    assert scored.reward == 2.5 and scored.metrics["gold"] == 1.0
    with Scorer(section) as scorer:
        outcomes = scorer.score([(task, environment.gold(task)) for task in tasks.values()])
    assert {name: outcome.reward for name, outcome in zip(tasks, outcomes, strict=True)} == {
        "sums": 2.5,
        "letters": 1.0,
    }


def test_part_inherits_prompting_and_rewards_of_mixture() -> None:
    function = "def half(completions, **kwargs):\n    return [0.5]\n"
    section = {
        **mixture(a={**gym("chain_sum"), "weight": 2}, b={**LETTERS, "prompting": {"format": "json"}}),
        "prompting": {"format": "boxed"},
        "rewards": {"half": {"function": "half.py:half", "source": function}},
    }
    parts = part_sections(section)
    assert parts["a"]["prompting"] == {"format": "boxed"} and parts["b"]["prompting"] == {"format": "json"}
    assert parts["a"]["rewards"] == parts["b"]["rewards"] == section["rewards"] and "weight" not in parts["a"]
    tasks = list(islice(make_environment(section).tasks("train", 0), 8))
    with Scorer(section) as scorer:  # the function is loaded in the confined process, for each part
        assert {score.reward for score in scorer.score([(task, Transcript("x")) for task in tasks])} == {0.5}


def test_file_fields_include_files_of_parts(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": str(n), "answer": str(n)}) + "\n" for n in range(40)))
    section = mixture(own={"id": "jsonl", "path": str(rows)}, sums=SUMS)
    assert file_fields(section) == {"parts.own.path": str(rows)}
    rows.write_text("nonsense")
    with pytest.raises(RequestError, match="JSON"):
        make_environment(section)
    make_environment(section, checked=False)  # scoring does not need the files


@pytest.mark.parametrize(
    ("section", "where", "error"),
    [
        (mixture(a=mixture(b=SUMS)), "environment.parts.a.id", "cannot be a mixture"),
        (mixture(a={**SUMS, "episodes": {"seconds": 3}}), "environment.parts.a.episodes", "whole mixture"),
        (mixture(a={**GUESS, "players": 2}), "environment.parts.a", "one player"),
        (mixture(a={**SUMS, "promt": "compact"}), "environment.parts.a.promt", "no field"),
        (mixture(a={"id": "nothing"}), "environment.parts.a.id", "no environment called"),
        (mixture(a={"task": "chain_sum"}), "environment.parts.a.id", "is missing"),
        (mixture(a={**SUMS, "weight": -1}), "environment.parts.a.weight", "greater than or equal"),
        (mixture(a={**SUMS, "weight": 0}), "environment", "no training tasks"),
        (mixture(**{"a/b": SUMS}), "environment.parts.a/b.[key]", "match pattern"),
        ({"id": "mixture", "parts": {}}, "environment.parts", "at least 1"),
        ({"id": "mixture", "parts": 3}, "environment.parts", "dictionary"),
        (
            mixture(
                a={**SUMS, "rewards": {"f": {"function": "f.py:f", "source": "def f(**k): return [1]"}}},
                b={**GUESS, "confined": False},
            ),
            "environment.parts.a.rewards",
            "cannot run there",
        ),
    ],
)  # fmt: skip
def test_invalid_mixture_names_part(section: Any, where: str, error: str) -> None:
    with pytest.raises(RequestError, match=error) as caught:
        make_environment(section)
    assert caught.value.where == where
