"""The reasoning-gym adapter: tasks, splits, prompts, rewards, strategies and errors."""

import json
import re
import time
from dataclasses import replace
from itertools import islice

import pytest
from environment_cases import ADDITION, gym

from perilune.environments import Failure, Observation, Score, Transcript, make_environment
from perilune.environments.adapters.compact import PROMPTS
from perilune.environments.adapters.reasoning_gym import (
    HASH_SEEDED_FAMILIES,
    ReasoningGymEnvironment,
    extract_final_answer,
    from_json,
    to_json,
)
from perilune.errors import RequestError


@pytest.fixture(scope="module")
def addition():
    return make_environment(ADDITION)


def take(environment, count, split="train", seed=0):
    return list(islice(environment.tasks(split, seed), count))


def prompt(task):
    return task.prompt[-1]["content"]


# Tasks and splits


def test_5000_distinct_tasks_take_less_than_5_seconds(addition):
    begun = time.process_time()
    tasks = take(addition, 5000)
    assert time.process_time() - begun < 5.0  # takes minutes without a limit on retries
    assert len({task.task_id for task in tasks}) == 5000


def test_seed_determines_task_order(addition):
    again = make_environment(ADDITION)
    assert take(addition, 2500, seed=3) == take(again, 2500, seed=3)
    assert take(addition, 100, seed=3) != take(addition, 100, seed=4)


def test_splits_share_no_question_for_any_seed_and_operand_order(addition):
    def operands(task):
        return tuple(sorted(prompt(task).removesuffix("=").split("+")))

    heldout = {operands(task) for seed in (0, 1) for task in take(addition, 2000, "heldout", seed)}
    train = {operands(task) for seed in (0, 5) for task in take(addition, 6000, "train", seed)}
    assert not heldout & train
    assert len(train) > 10_000


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gcd", {"max_numbers": 2, "max_value": 40}),
        ("lcm", {"max_numbers": 2, "max_value": 40}),
        ("countdown", {"min_numbers": 2, "max_numbers": 2, "max_value": 9, "min_target": 1}),
    ],
)
def test_order_of_numbers_does_not_change_the_split(family, config):
    def numbers(task):
        listed, _, target = prompt(task).partition(">")
        return target, *sorted(re.findall(r"\d+", listed))

    environment = make_environment(gym(family, config=config, prompt="compact"))
    heldout, train = (
        {numbers(task) for task in take(environment, count, split)}
        for split, count in (("heldout", 40), ("train", 500))
    )
    assert len(heldout) > 5 and not heldout & train


def test_one_tenth_of_tasks_is_held_out(addition):
    stream = addition.tasks("train", 0)
    ids = [task.task_id for task in islice(stream, 9000)]
    tasks = take(addition, 1000, "heldout")
    assert len(set(ids) | {task.task_id for task in tasks}) == 10_000
    small = make_environment(gym("chain_sum", config={"max_terms": 2, "max_digits": 1}))
    train, heldout = list(small.tasks("train", 0)), list(small.tasks("heldout", 0))
    assert len(train) + len(heldout) == 200  # every sum and difference of two digits, then the end
    assert 5 <= len(heldout) <= 40


def test_prompt_mode_does_not_change_task_or_split():
    spec = gym("chain_sum", config={"max_terms": 2})
    original, compact = (
        take(make_environment(spec | {"prompt": mode}), 50) for mode in ("original", "compact")
    )
    assert [task.task_id for task in original] == [task.task_id for task in compact]
    assert prompt(original[0]).startswith("State the final answer")
    assert len(prompt(compact[0])) < 12


def test_task_data_round_trips_through_json(addition):
    for task in (*take(addition, 5), *take(make_environment(gym("rearc")), 2)):
        assert json.loads(json.dumps(task.data)) == task.data


def test_encode_and_decode_preserve_metadata_through_json():
    value = {"a": (1, (2,)), "b": {3: [4], (5, 6): None}, "c": {"d": "e"}}
    assert from_json(json.loads(json.dumps(to_json(value)))) == value


def test_difficulty_of_sum_counts_columns_and_carries(addition):
    by_prompt = {prompt(task): task.difficulty for task in take(addition, 3000)}
    for text, difficulty in by_prompt.items():
        a, b = text.removesuffix("=").split("+")
        assert len(a) == len(b)
        columns = len(str(max(int(a), int(b))))
        carries = (sum(map(int, a + b)) - sum(map(int, str(int(a) + int(b))))) // 9
        assert difficulty == columns + carries


def test_difficulty_of_other_families_is_value_of_family():
    (task,) = take(make_environment(gym("countdown", config={"min_numbers": 4, "max_numbers": 4})), 1)
    assert task.difficulty == 4


def test_hash_seeded_families_require_fixed_hash_seed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    environment = make_environment(gym("word_ladder"))
    with pytest.raises(RequestError) as caught:
        next(environment.tasks("train", 0))
    assert "PYTHONHASHSEED=0" in caught.value.remedy
    assert set(ReasoningGymEnvironment.families()) >= HASH_SEEDED_FAMILIES


# Prompts


@pytest.mark.parametrize("family", sorted(PROMPTS))
def test_compact_prompts_are_short_and_gold_answer_passes(family):
    environment = make_environment(gym(family, prompt="compact"))
    for task in take(environment, 20):
        assert len(prompt(task)) <= 60 and "\n" not in prompt(task)
        gold = environment.gold(task)
        assert gold.text.startswith(";")
        assert environment.score(task, gold).reward == 1.0


def test_compact_addition_prompt_is_sum(addition):
    for task in take(addition, 20):
        a, b = prompt(task).removesuffix("=").split("+")
        assert task.data["answer"] == str(int(a) + int(b))


def test_family_without_compact_prompt_lists_families_with_one():
    with pytest.raises(RequestError) as caught:
        make_environment(gym("sudoku", prompt="compact"))
    assert caught.value.where == "environment.prompt"
    assert "chain_sum" in caught.value.remedy


def test_error_of_a_generator_names_the_settings():
    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 5000, "max_digits": 5000}
    environment = make_environment({"id": "reasoning_gym", "task": "basic_arithmetic", "config": digits})
    with pytest.raises(RequestError, match="generator of 'basic_arithmetic' raised ValueError") as caught:
        next(environment.tasks("train", seed=0))
    assert caught.value.where == "environment.config"


def test_original_answer_finds_answer_in_free_text():
    assert extract_final_answer("<think>1+1</think>\n 2 ") == "2"
    assert extract_final_answer("no <answer>1</answer> but <answer> 2</answer>.") == "2"
    assert extract_final_answer(" 2") == "2"


# Rewards


@pytest.fixture(scope="module")
def sum_task(addition):
    (task,) = take(addition, 1)
    data = task.data | {
        "answer": "615",
        "compact": "347+268=",
        "metadata": task.data["metadata"] | {"expression": "347 + 268"},
    }
    return replace(task, prompt=({"role": "user", "content": "347+268="},), data=data)


@pytest.mark.parametrize(
    ("text", "reward", "strategy", "valid"),
    [
        (";615", 1.0, "direct", None),
        (";614", 0.0, "direct", None),
        ("78015,46111,32106;615", 1.0, "scratchpad", 1.0),
        ("78015,46111,32106;616", 0.0, "scratchpad", 1.0),
        ("78016,46111,32106;615", 1.0, "scratchpad", 0.0),
        ("78015;615", 1.0, "scratchpad", 0.0),
        ("15,11,06;615", 1.0, "brief", 1.0),
        ("15,12,06;615", 1.0, "brief", 0.0),
        ("hmm;615", 1.0, "scratchpad", 0.0),
        (";614;615", 1.0, "scratchpad", 0.0),
        ("615", 0.0, "none", None),
        ("", 0.0, "none", None),
        (";", 0.0, "direct", None),
        (";0615", 0.0, "direct", None),
        (";615.0", 0.0, "direct", None),
        (";615 ", 0.0, "direct", None),
        (";6150", 0.0, "direct", None),
    ],
)
def test_compact_sum_is_scored_by_answer_and_labelled_by_working(
    addition, sum_task, text, reward, strategy, valid
):
    outcome = addition.score(sum_task, Transcript(text))
    assert outcome.reward == reward
    assert {name for name in outcome.metrics if name.startswith("strategy/")} == {f"strategy/{strategy}"}
    assert outcome.metrics.get("trace_valid") == valid


def test_strict_requires_finished_answer(addition, sum_task):
    assert addition.score(sum_task, Transcript(";615", finished=False)).reward == 0.0
    lenient = make_environment(ADDITION | {"strict": False})
    assert lenient.score(sum_task, Transcript(";615", finished=False)).reward == 1.0
    assert lenient.score(sum_task, Transcript(";0615")).terms == {"raw": 0.75, "well_formed": 0.0}


def test_threshold_removes_partial_credit():
    config = {"min_numbers": 3, "max_numbers": 3}
    strict = make_environment(gym("countdown", config=config))
    lenient = make_environment(gym("countdown", config=config, strict=False))
    raw = make_environment(gym("countdown", config=config, strict=False, threshold=None))
    (task,) = take(strict, 1)
    for text, credit in (("", 0.01), ("I give up", 0.01), ("1+1", 0.05)):
        assert raw.score(task, Transcript(text)).reward == pytest.approx(credit)
        assert lenient.score(task, Transcript(text)).reward == 0.0
        assert strict.score(task, Transcript(text)).reward == 0.0
    assert strict.score(task, strict.gold(task)).reward == 1.0


def test_strict_gives_no_reward_for_empty_answer_without_threshold():
    environment = make_environment(gym("countdown", threshold=None))
    (task,) = take(environment, 1)
    assert environment.score(task, Transcript("")).reward == 0.0


def test_exception_in_scorer_is_verifier_failure():
    environment = make_environment(gym("prime_factorization", strict=False))
    (task,) = take(environment, 1)
    outcome = environment.score(task, Transcript("xyzzy"))
    assert isinstance(outcome, Failure) and outcome.boundary == "verifier"
    assert "ValueError" in outcome.reason


def test_score_that_is_not_finite_is_failure(addition, sum_task, monkeypatch):
    for figure in (float("nan"), float("inf"), None):
        monkeypatch.setattr(addition._dataset, "score_answer", lambda answer, entry, f=figure: f)
        assert isinstance(addition.score(sum_task, Transcript(";615")), Failure)


def test_scoring_is_repeatable_and_does_not_change_task(addition):
    for task in take(addition, 50):
        before = json.dumps(task.data)
        outcomes = {repr(addition.score(task, addition.gold(task))) for _ in range(3)}
        assert len(outcomes) == 1
        assert json.dumps(task.data) == before


def test_session_ends_after_one_answer(addition, sum_task):
    session = addition.reset(sum_task, seed=0)
    assert session.observation == Observation()
    end = session.step(";615")
    assert end.done and end.rewards == (1.0,) and end.terms == {"raw": 1.0, "well_formed": 1.0}
    with pytest.raises(ValueError, match="is done"):
        session.step(";615")


def test_score_returns_reward_terms_and_strategy(addition, sum_task):
    assert addition.score(sum_task, Transcript(";615")) == Score(
        1.0, {"raw": 1.0, "well_formed": 1.0}, {"strategy/direct": 1.0}
    )


# Errors


@pytest.mark.parametrize(
    ("spec", "where", "hint"),
    [
        (gym("basic_aritmetic"), "environment.task", "did you mean 'basic_arithmetic'?"),
        (
            gym("chain_sum", config={"max_digit": 2}),
            "environment.config.max_digit",
            "did you mean 'max_digits'?",
        ),
        (gym("chain_sum", config={"seed": 2}), "environment.config.seed", ""),
        (gym("chain_sum", config={"max_digits": 0}), "environment.config", ""),
        (gym("chain_sum", config={"max_digits": "many"}), "environment.config.max_digits", ""),
        (gym("chain_sum", threshold=2), "environment.threshold", ""),
        (gym("chain_sum", promt="compact"), "environment.promt", "did you mean 'prompt'?"),
        ({"id": "reasoning_gym"}, "environment.task", ""),
    ],
)
def test_invalid_section_names_key_and_suggests_valid_key(spec, where, hint):
    with pytest.raises(RequestError) as caught:
        make_environment(spec)
    assert caught.value.where == where
    assert hint in caught.value.remedy
