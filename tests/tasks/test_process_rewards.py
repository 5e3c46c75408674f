"""Process rewards: answer values, Monte Carlo values, and rl stages with them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from task_cases import episodes, make_job, metrics, run_task, summary
from task_environments import Digits
from tokenizers import models, pre_tokenizers

from perilune.bundle.plugin import load_plugin
from perilune.engine.engine import Engine
from perilune.environments.core.protocol import Task
from perilune.environments.core.reference_answer import ReferenceAnswer
from perilune.environments.core.registry import make_environment
from perilune.errors import RequestError
from perilune.files import read_json_lines
from perilune.learn.process_rewards import AnswerValues, MonteCarloValues
from perilune.models.checkpoints.loading import new_model
from perilune.models.text.tokenizer import Tokenizer
from perilune.recipe.load import bundled_recipe, load_recipe
from perilune.recipe.schema import build_job
from perilune.rollout.timing import Stopwatch
from perilune.rollout.worker import RolloutWorker
from perilune.tasks.process_rewards import rewards as module
from perilune.tasks.process_rewards.montecarlo import Prefix, score_continuations
from perilune.tasks.process_rewards.rewards import (
    ProcessRewards,
    SegmentedEpisode,
    potential,
    prefix_means,
    step_rewards,
)
from perilune.tasks.rl.spec import RLSpec
from perilune.verifiers import Scorer

STATED = {"id": "factory", "factory": "process_environments:Stated"}
SHORT = {"cut": "length", "least": 2}


class Spy:
    """A scorer that records its requests."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer, self.items = scorer, []

    def score(self, items):
        self.items += items
        return self._scorer.score(items)

    def __getattr__(self, name: str):
        return getattr(self._scorer, name)


@pytest.fixture(scope="module")
def policy() -> Iterator[SimpleNamespace]:
    tokenizer = Tokenizer.characters()
    with Scorer(STATED) as scorer:
        yield SimpleNamespace(
            tokenizer=tokenizer, decoder=new_model("tiny", tokenizer, seed=3), scorer=scorer
        )


def process(policy, settings, max_tokens: int = 8) -> ProcessRewards:
    environment = make_environment(STATED)
    spec = RLSpec(checkpoint="model", max_tokens=max_tokens)
    engine = Engine(policy.decoder, tokenizer=policy.tokenizer)
    rollouts = RolloutWorker(engine, policy.tokenizer, Spy(policy.scorer), environment, 5)
    return ProcessRewards(settings, policy.decoder, rollouts, spec, 512)


def tasks_and_options(made: ProcessRewards, count: int = 3):
    tasks = list(islice(made.rollouts.environment.tasks("train", 0), count))
    params = made.sampling.params(made.decoder.config.eos_token_ids)
    how = {"samples": 2, "params": params, "step": 1, "watch": Stopwatch(), "first": 0}
    return tasks, how


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=6), st.integers(0, 4))
def test_sum_of_step_rewards_is_independent_of_segments(values: list[float], detours: int) -> None:
    """The step rewards sum to minus the value of the start, however the answer is segmented."""

    def earned(path: list[float]) -> float:
        episode = SimpleNamespace(loss_mask=np.ones(len(path), bool))
        walk = SegmentedEpisode(Task("", (), {}), episode, tuple(range(len(path))), None)
        return float(step_rewards(walk, np.array(path)).sum(dtype=np.float64))

    longer = [values[0], *([0.9, 0.1] * detours), *values[1:]]
    assert earned(values) == pytest.approx(-values[0], abs=1e-5)
    assert earned(longer) == pytest.approx(-values[0], abs=1e-5)


def test_step_rewards_are_placed_at_the_last_policy_token() -> None:
    episode = SimpleNamespace(loss_mask=np.array([True, True, False, True, False]))
    rewards = step_rewards(SegmentedEpisode(Task("", (), {}), episode, (0, 3), None), np.array([0.25, 0.75]))
    np.testing.assert_array_equal(rewards, np.array([np.nan, 0.5, np.nan, -0.75, np.nan], np.float32))


def test_guessable_answers_get_no_potential() -> None:
    likely, unlikely = np.log([0.6, 0.7]), np.log([0.4, 0.7])
    assert potential(likely, AnswerValues()) is None
    np.testing.assert_allclose(potential(unlikely, AnswerValues()), [0.4, 0.7])
    assert potential(likely, AnswerValues(guessable=0.9)) is not None
    np.testing.assert_allclose(potential(np.array([-5, -1]), AnswerValues(floor=-2)), [-1, -0.5])


def test_answers_are_tokenized_together_with_the_lead() -> None:
    vocabulary = {token: index for index, token in enumerate(["<eos>", "i", "s", ":", "6", "1", ":6", "is"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("i", "s"), (":", "6")]))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer = Tokenizer(backend, {"eos_token": "<eos>"})
    assert tokenizer.encode("is:") == [7, 3]
    assert module._endings(tokenizer, "is:", ("61", "1")) == [([7, 6, 5], 2), ([7, 3, 5], 1)]


def test_answer_values_come_from_the_sampling_policy(policy) -> None:
    made = process(policy, AnswerValues(segments=SHORT, guessable=1.0))
    tasks, how = tasks_and_options(made)
    plain = made.rollouts.play(tasks, **how)
    groups = made.play(tasks, **how)
    for task, group, before in zip(tasks, groups, plain, strict=True):
        for new, other in zip(group, before, strict=True):
            assert new.messages == other.messages  # the reference answer must not leak into training data
            np.testing.assert_array_equal(new.token_ids, other.token_ids)
            np.testing.assert_array_equal(new.prompt_ids, other.prompt_ids)
            walk = made._segment(task, made.rollouts.environment.reference_answer(task), new)
            lead, answer = policy.tokenizer.encode(";"), policy.tokenizer.encode(task.data["answer"])
            value = [
                np.exp(
                    made.rollouts.engine.score([[*new.prompt_ids, *new.token_ids[:prefix], *lead]], [answer])[
                        0
                    ].mean(dtype=np.float64)
                )
                for prefix in walk.prefixes
            ]
            ends = np.flatnonzero(~np.isnan(new.step_rewards))
            assert ends.tolist() == [*(prefix - 1 for prefix in walk.prefixes[1:]), len(new.token_ids) - 1]
            np.testing.assert_allclose(new.step_rewards[ends], np.diff([*value, 0.0]), atol=1e-6)
    assert how["watch"].process_rewards > 0


def test_repeating_the_answer_earns_nothing(policy) -> None:
    made = process(policy, AnswerValues(segments={"separators": ["\n"], "least": 1}))
    tasks, how = tasks_and_options(made, 1)
    original = made.rollouts.play(tasks, **how)[0][0]
    gold = tasks[0].data["answer"]

    def prefixes(text: str) -> tuple[int, ...]:
        ids = np.array(policy.tokenizer.encode_completion(text), np.int32)
        blank = np.zeros(len(ids), np.float32)
        written = replace(
            original, token_ids=ids, logprobs=blank, loss_mask=np.ones(len(ids), bool),
            policy_version=np.zeros(len(ids), np.int32),
        )  # fmt: skip
        return made._segment(tasks[0], made.rollouts.environment.reference_answer(tasks[0]), written).prefixes

    assert prefixes("so\nthen\n;0") == (0, 3, 8)
    assert prefixes(f"so\nit is {gold}\n{gold}\n{gold};0") == (0, 3, 9)
    assert prefixes(f"{gold}\n{gold}\n;{gold}") == (0,)


def test_missing_or_too_long_answers_get_no_step_rewards(policy) -> None:
    made = process(policy, AnswerValues(segments=SHORT, guessable=1.0))
    tasks, how = tasks_and_options(made, 2)
    silent = {tasks[0].task_id: None, tasks[1].task_id: ReferenceAnswer(";", ("9" * 5000,), (";",))}
    made.rollouts.environment.reference_answer = lambda task: silent[task.task_id]
    groups = made.play(tasks, **how)
    assert [episode.step_rewards for group in groups for episode in group] == [None] * 4


def test_continuations_start_from_the_prefix(policy) -> None:
    made = process(policy, MonteCarloValues())
    (task,), how = tasks_and_options(made, 1)
    scorer = made.rollouts.scorer
    prompt = np.array(policy.tokenizer.encode_prompt(task.prompt), np.int32)
    written = np.array(policy.tokenizer.encode("ab"), np.int32)
    start = Prefix(task, prompt, written[:0])
    drawn = []
    sample = made.rollouts.engine.sample
    made.rollouts.engine.sample = lambda prompts, *rest: drawn.append(prompts) or sample(prompts, *rest)
    params = replace(how["params"], max_tokens=4)
    positions = [start, Prefix(task, prompt, written), start]
    first, middle, again = score_continuations(made.rollouts, positions, 40, params, 1)
    assert len(drawn[0]) == 2  # equal prefixes are sampled once
    assert first is again
    texts = [transcript.text for _, transcript in scorer.items[40:]]
    assert all(text.startswith("ab") and len(text) <= 4 for text in texts)
    assert len(set(texts)) > 20
    expected = [float(any(character.isdigit() for character in text)) for text in texts]
    assert middle.tolist() == expected
    assert 0 < np.mean(expected) < 1
    cut = [transcript for _, transcript in scorer.items[40:] if len(transcript.text) == 4]
    assert cut and not all(transcript.finished for transcript in cut)


def test_continuations_end_at_the_stop_texts_of_their_task(policy, monkeypatch) -> None:
    """Each part of a mixture has its own stop texts."""
    made = process(policy, MonteCarloValues())
    tasks, how = tasks_and_options(made, 2)
    stops = {tasks[0].task_id: ("a", "7"), tasks[1].task_id: ()}
    monkeypatch.setattr(
        RolloutWorker, "add_stop_texts", lambda _, params, task: replace(params, stop=stops[task.task_id])
    )
    prompts = [np.array(policy.tokenizer.encode_prompt(task.prompt), np.int32) for task in tasks]
    prefixes = [Prefix(task, prompt, prompt[:0]) for task, prompt in zip(tasks, prompts, strict=True)]
    score_continuations(made.rollouts, prefixes, 40, replace(how["params"], max_tokens=60), 1)
    stopped, free = made.rollouts.scorer.items[:40], made.rollouts.scorer.items[40:]
    texts = [transcript.text for _, transcript in stopped]
    assert not any(character in text[:-1] for text in texts for character in "a7")
    assert {text[-1] for text in texts if text} >= {"a", "7"}
    assert all(transcript.finished for _, transcript in stopped if transcript.text[-1:] in ("a", "7"))
    assert any("a" in transcript.text[:-1] for _, transcript in free)


def test_continuations_end_at_a_stop_text_that_begins_in_the_prefix(policy, monkeypatch) -> None:
    made = process(policy, MonteCarloValues())
    (task,), how = tasks_and_options(made, 1)
    monkeypatch.setattr(
        RolloutWorker, "add_stop_texts", lambda _, params, task: replace(params, stop=("a7", "ab"))
    )
    prompt, written = (
        np.array(ids, np.int32)
        for ids in (policy.tokenizer.encode_prompt(task.prompt), policy.tokenizer.encode("ca"))
    )
    score_continuations(made.rollouts, [Prefix(task, prompt, written)], 200, how["params"], 1)
    ended = [transcript for _, transcript in made.rollouts.scorer.items if transcript.text[2:3] in ("7", "b")]
    assert ended and all(len(transcript.text) == 3 and transcript.finished for transcript in ended)


def test_continuations_use_other_random_numbers_than_episodes(policy) -> None:
    made = process(policy, MonteCarloValues(continuations=2, segments=SHORT))
    tasks, how = tasks_and_options(made, 1)
    texts = {episode.text for episode in made.rollouts.play(tasks, **how)[0]}
    made.rollouts.scorer.items.clear()
    prompt = np.array(policy.tokenizer.encode_prompt(tasks[0].prompt), np.int32)
    score_continuations(made.rollouts, [Prefix(tasks[0], prompt, prompt[:0])], 2, how["params"], 1)
    drawn = [transcript.text for _, transcript in made.rollouts.scorer.items]
    assert texts.isdisjoint(drawn)
    made.rollouts.scorer.items.clear()
    other = replace(made.rollouts, seed=made.rollouts.seed + 1)
    score_continuations(other, [Prefix(tasks[0], prompt, prompt[:0])], 2, how["params"], 1)
    assert [transcript.text for _, transcript in made.rollouts.scorer.items] != drawn


def test_monte_carlo_values_refuse_multi_turn_environments(policy) -> None:
    made = process(policy, AnswerValues())
    made.rollouts.environment.max_turns = 3
    with pytest.raises(RequestError, match="supports one turn per episode"):
        replace(made, settings=MonteCarloValues())


def test_prefix_without_a_verdict_has_no_mean() -> None:
    np.testing.assert_array_equal(prefix_means(np.array([[1, 0, np.nan], [1, 1, 1]])), [0.5, 1.0])
    assert prefix_means(np.array([[1.0, 0.0], [np.nan, np.nan]])) is None


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("grpo", {"name": "answer"}),
        ("dapo", {"name": "answer", "role": "trace"}),
        ("ppo", {"name": "answer", "role": "reward"}),
        ("grpo", {"name": "montecarlo", "continuations": 2}),
        ("reinforce_pp", {"name": "montecarlo", "role": "reward", "continuations": 2}),
    ],
)
def test_rl_with_process_rewards(tmp_path, algorithm: str, settings: dict) -> None:
    bundle = run_task(
        tmp_path / "b", "rl", environment=STATED, algorithm=algorithm, steps=2,
        process_rewards={**settings, "segments": SHORT}, prompts=3, samples=3,
    )  # fmt: skip
    assert all(line["process/segments"] > 1 for line in metrics(bundle))
    table = episodes(bundle)
    assert table["step_rewards"].notna().any()
    timings = list(read_json_lines(bundle / "artifacts" / "timings.jsonl"))
    assert all(0 < line["process_rewards"] <= line["other"] for line in timings)


def test_process_rewards_are_computed_before_the_updates_of_a_batch(tmp_path) -> None:
    """Process rewards use the sampling weights, however many updates the batch gets."""
    seen = {}
    for updates in (1, 3):
        bundle = run_task(
            tmp_path / str(updates), "rl", environment=STATED, steps=1, warmup=0, lr=0.1,
            process_rewards={"name": "answer", "segments": SHORT}, updates_per_batch=updates,
        )  # fmt: skip
        seen[updates] = [row.tolist() for row in episodes(bundle)["step_rewards"]]
    np.testing.assert_array_equal(np.concatenate(seen[1]), np.concatenate(seen[3]))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"algorithm": "ppo", "process_rewards": "answer"}, "takes process rewards as reward"),
        ({"process_rewards": {"name": "answer", "role": "reward"}}, "bonus, advantage or trace"),
        ({"process_rewards": "montecarlo", "reward_model": "judge"}, "estimates the verifier's score"),
        (
            {"process_rewards": "montecarlo", "kl": 0.1, "kl_estimator": "k1_reward"},
            "role advantage replaces them",
        ),
        ({"process_rewards": "oracle"}, "answer"),
        ({"process_rewards": {"name": "answer", "continuations": 3}}, "continuations"),
    ],
)
def test_inconsistent_process_reward_options_are_refused(fields: dict, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        RLSpec(checkpoint="model", **fields)


def test_plan_describes_monte_carlo_process_rewards() -> None:
    job = make_job("rl", environment=STATED, process_rewards={"name": "montecarlo"})
    plan = load_plugin("rl").plan(job)
    text = "as advantage, at most 24 segments an answer, 9 continuations from the beginning of each"
    assert plan["process rewards"] == text


def test_bundled_process_rewards_recipe_runs_with_small_settings(tmp_path) -> None:
    """The stages with process rewards, scaled down, on an untrained policy."""
    recipe = load_recipe(bundled_recipe("process_rewards"))
    small = {"tasks": 3, "samples": 2, "continuations": 2}
    for stage in recipe.stages:
        whole = dict(build_job(recipe, stage).spec)
        if stage.task == "calibrate":
            process_rewards = whole["process_rewards"] | {"guessable": 1.0}
            spec = whole | small | {"process_rewards": process_rewards}
            bundle = run_task(tmp_path / stage.name, "calibrate", environment=recipe.environment, **spec)
            assert summary(bundle)["sentences"]
        if stage.task == "rl":
            bundle = run_task(
                tmp_path / stage.name, "rl", environment=recipe.environment,
                **whole | {"steps": 1, "prompts": 2, "samples": 2, "warmup": 0},
            )  # fmt: skip
            assert "process/without" in metrics(bundle)[0]


def test_answer_values_refuse_environments_without_answers(policy) -> None:
    made = process(policy, AnswerValues())
    silent = replace(made.rollouts, environment=Digits({}))
    with pytest.raises(RequestError, match="states no right answer"):
        replace(made, rollouts=silent)


def test_plan_refuses_rewards_ignored_beside_a_reward_model() -> None:
    environment = {**STATED, "rewards": {"verifier": 1.0}}
    job = make_job("rl", environment=environment, reward_model="judge")
    with pytest.raises(RequestError, match="`rewards` is ignored when `reward_model` is set"):
        load_plugin("rl").plan(job)
    load_plugin("rl").plan(make_job("rl", environment=environment, reward_model="judge", verifier_weight=1.0))
