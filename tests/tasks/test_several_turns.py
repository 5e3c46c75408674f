"""Multi-turn episodes: tokens are only appended, and failures stay in their episode."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from task_cases import episodes, figures_of, make_bundle, make_job, metrics, run_in, run_task, summary
from task_environments import Talk
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from perilune.bundle.compare import compare_artifacts
from perilune.data.episode import Episode
from perilune.engine.engine import Engine
from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.environments import Transcript, make_environment
from perilune.errors import RequestError, WorkFailedError
from perilune.files import read_json_lines
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.groups import Groups
from perilune.rollout.rollout import Trajectory
from perilune.rollout.timing import Stopwatch
from perilune.rollout.worker import RolloutWorker, session_seed
from perilune.tasks.rl.metrics import StepRecorder
from perilune.tasks.stage.training import StepReport
from perilune.verifiers import Scorer

TALK = {"id": "factory", "factory": "task_environments:Talk"}
ENDS = tuple(range(1, 14))  # any of them ends a turn, so that an untrained policy takes several turns
PARAMS = SamplingParams(24, 1.0, ENDS)


def many_spellings() -> Tokenizer:
    """A tokenizer with tokens for digits and pairs of digits, so that most texts have several encodings."""
    symbols = ["<pad>", "<eos>", *"0123456789 luck[]=?"]
    pairs = [(a, b) for a in "0123456789" for b in "0123456789"]
    vocabulary = {token: index for index, token in enumerate([*symbols, *(a + b for a, b in pairs)])}
    backend = Backend(models.BPE(vocabulary, pairs))
    backend.pre_tokenizer = pre_tokenizers.Sequence([])
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<pad>", "<eos>"])
    return Tokenizer(backend, {"eos_token": "<eos>", "pad_token": "<pad>"})


TOKENIZER = many_spellings()


class Recording(Engine):
    """An engine that records its prompts and completions."""

    log: list[tuple[Prompt, list[Completion]]]

    def sample(self, prompts: Any, n: int, params: SamplingParams, on_progress: Any = None) -> Any:
        completions = super().sample(prompts, n, params, on_progress)
        self.log += zip(prompts, completions, strict=True)
        return completions


def engine_of(tokenizer: Tokenizer, seed: int = 0) -> Recording:
    config = PRESETS["tiny"].replace(
        vocab_size=tokenizer.vocab_size, num_layers=1, hidden_size=32, eos_token_ids=(1,)
    )
    decoder = Decoder(config)
    decoder.initialize(seed)
    engine = Recording(decoder)
    engine.log = []
    return engine


def play(
    section: dict[str, Any],
    count: int = 6,
    *,
    engine: Engine | None = None,
    skip: int = 0,
    samples: int = 4,
    params: SamplingParams = PARAMS,
) -> Groups:
    spec = TALK | section
    environment = Talk(spec)
    tasks = list(islice(environment.tasks("train", 0), skip, skip + count))
    with Scorer(spec) as scorer:
        rollouts = RolloutWorker(engine or engine_of(TOKENIZER), TOKENIZER, scorer, environment, 7)
        return rollouts.play(tasks, samples=samples, params=params, step=1, watch=Stopwatch(), first=skip)


def test_episodes_record_the_right_answer_and_prompts_do_not_have_it() -> None:
    section = {"id": "reasoning_gym", "task": "basic_arithmetic", "prompt": "compact"}
    environment, tokenizer = make_environment(section), Tokenizer.characters()
    tasks = list(islice(environment.tasks("train", 0), 2))
    with Scorer(section) as scorer:
        rollouts = RolloutWorker(engine_of(tokenizer), tokenizer, scorer, environment, 7)
        groups = rollouts.play(
            tasks, samples=2, params=SamplingParams(4, 1.0, (1,)), step=1, watch=Stopwatch(), first=0
        )
    for task, group in zip(tasks, groups, strict=True):
        assert {episode.expected for episode in group} == {f";{task.data['answer']}"}
        assert all(episode.opening == task.prompt for episode in group)


def runs(mask: np.ndarray) -> list[slice]:
    """The token ranges of the policy's turns."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return [slice(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def test_sampled_tokens_are_never_retokenized() -> None:
    engine = engine_of(TOKENIZER)
    groups = play({}, engine=engine)
    everything = [episode for group in groups for episode in group]
    given = [tuple(answer.token_ids.tolist()) for _, completions in engine.log for answer in completions]
    asked = {tuple(prompt.token_ids) for prompt, _ in engine.log}
    turns, respelt = [], 0
    for episode in everything:
        for span in runs(episode.loss_mask):
            before = (*episode.prompt_ids.tolist(), *episode.token_ids[: span.start].tolist())
            assert before in asked
            turn = episode.token_ids[span].tolist()
            turns.append(tuple(turn))
            respelt += TOKENIZER.encode_completion(TOKENIZER.decode(turn)) != turn
        assert not episode.logprobs[~episode.loss_mask].any()
        assert (episode.policy_version[~episode.loss_mask] == -1).all()
    assert sorted(turns) == sorted(given)
    assert sum(len(runs(episode.loss_mask)) == 3 for episode in everything) > 4
    assert respelt > len(turns) / 2  # so retokenization would show


def test_messages_match_the_tokens_of_turns_and_observations() -> None:
    episode = next(episode for group in play({}) for episode in group if episode.metrics["turns"] == 3)
    turns = runs(episode.loss_mask)
    contents = [message["content"] for message in episode.messages]
    assert [message["role"] for message in episode.messages] == [
        "user", "user", "assistant", "tool", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert contents[2] == TOKENIZER.decode(episode.token_ids[turns[0]].tolist())
    assert contents[3] == f"[{len(contents[2])}]"
    between = episode.token_ids[turns[0].stop : turns[1].start].tolist()
    assert between == TOKENIZER.encode(contents[3])
    assert episode.text == contents[-1] and len(episode.opening) == 2
    assert episode.prompt_ids.tolist() == TOKENIZER.encode(contents[0] + contents[1])


def test_logprobs_are_conditioned_on_the_whole_context() -> None:
    engine = engine_of(TOKENIZER)
    everything = [episode for group in play({}, engine=engine) for episode in group]
    scores = engine.score([e.prompt_ids for e in everything], [e.token_ids for e in everything])
    for episode, scored in zip(everything, scores, strict=True):
        np.testing.assert_allclose(episode.logprobs[episode.loss_mask], scored[episode.loss_mask], atol=1e-4)


def test_recording_top_logprobs_does_not_change_sampling() -> None:
    plain = [episode for group in play({}) for episode in group]
    recorded = [episode for group in play({}, params=replace(PARAMS, top_logprobs=4)) for episode in group]
    assert plain[0].top_ids is None
    seen = 0
    for new, other in zip(recorded, plain, strict=True):
        assert np.array_equal(new.token_ids, other.token_ids) and np.array_equal(new.logprobs, other.logprobs)
        assert new.top_ids is not None and new.top_logprobs is not None
        own, observed = new.top_logprobs[new.loss_mask], ~new.loss_mask
        assert (np.diff(own, axis=1) <= 0).all() and (own < 0).all()
        assert (new.top_ids[observed] == -1).all() and not new.top_logprobs[observed].any()
        chosen = (new.top_ids == new.token_ids[:, None]) & new.loss_mask[:, None]
        assert np.array_equal(new.top_logprobs[chosen], new.logprobs[chosen.any(1)])
        seen += int(chosen.sum())
    assert seen > 20


def test_episode_depends_only_on_its_index() -> None:
    whole, part = play({}), play({}, count=2, skip=3)
    for group, again in zip(whole[3:5], part, strict=True):
        for episode, other in zip(group, again, strict=True):
            assert episode.episode_id == other.episode_id and episode.messages == other.messages
            assert np.array_equal(episode.token_ids, other.token_ids)
            assert np.array_equal(episode.logprobs, other.logprobs)
    texts = {episode.text for group in whole for episode in group}
    assert len(texts) > 12  # turns have independent random numbers


def test_no_two_turns_share_random_numbers() -> None:
    engine = engine_of(TOKENIZER)
    play({"players": 2}, engine=engine)
    drawn = [(prompt.key, sample) for prompt, answers in engine.log for sample in range(len(answers))]
    assert len(set(drawn)) == len(drawn) > 60
    assert all(0 <= lane < 2**32 for (_, *lanes), _ in drawn for lane in lanes)


def test_score_reproduces_the_reward_from_the_transcript() -> None:
    environment = Talk({})
    tasks = {task.task_id: task for task in islice(environment.tasks("train", 0), 6)}
    for group in play({}):
        for episode in group:
            actions = [message["content"] for message in episode.messages if message["role"] == "assistant"]
            _, step, index = (0, *map(int, episode.group_id.split("/")))
            transcript = Transcript(
                actions[-1],
                finished=not episode.truncated,
                earlier=tuple(actions[:-1]),
                seed=session_seed((episode.seed, step, index)),
            )
            assert environment.score(tasks[episode.task_id], transcript).reward == episode.reward


@pytest.mark.parametrize(
    ("bounds", "turns"), [({"max_turns": 2}, 2), ({"max_tokens": 30}, 30), ({"max_tokens": 24}, 1)]
)
def test_turn_and_token_limits_truncate_episodes(bounds: dict[str, int], turns: int) -> None:
    everything = [episode for group in play({"episodes": bounds, "turns": 30}) for episode in group]
    assert max(episode.metrics["turns"] for episode in everything) <= turns
    assert all(e.truncated and e.reward is not None and not e.failure for e in everything)
    longest = bounds.get("max_tokens", 1000)
    assert max(len(episode.token_ids) for episode in everything) <= longest + len("[48]")


def test_truncated_turn_ends_its_episode() -> None:
    for group in play({}):
        for episode in group:
            *_, last = runs(episode.loss_mask)
            assert episode.truncated == (episode.token_ids[last][-1] not in ENDS)
            if episode.truncated:
                assert last.stop == len(episode.token_ids)


def test_every_player_has_a_separate_episode_and_group() -> None:
    groups = play({"players": 2}, count=3)
    assert [group[0].group_id for group in groups] == ["1/0", "1/0/p1", "1/1", "1/1/p1", "1/2", "1/2/p1"]
    for first, second in zip(groups[::2], groups[1::2], strict=True):
        of_second = {episode.episode_id.rpartition("/")[2]: episode for episode in second}
        for episode in first:
            other = of_second.get(episode.episode_id.rpartition("/")[2])
            if other is None:  # the first player's first turn was cut off
                assert episode.truncated and episode.metrics["turns"] == 1
                continue
            assert "luck" in episode.messages[1]["content"] and "luck" not in other.messages[1]["content"]
            actions = [message["content"] for message in episode.messages if message["role"] == "assistant"]
            assert (
                other.messages[1]["content"] == f"[{len(actions[0])}]"
            )  # sees the length of the first action, not its text
    assert {episode.reward for group in groups for episode in group} - {0.0}


ANY = [*"0123456789"]


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"raises": ANY}, "environment: ValueError: no idea what this is"),
        ({"hangs": ["7"], "episodes": {"seconds": 0.5}}, "environment: no answer within "),
        ({"nan": ANY}, "environment: a number is not finite"),
        ({"stuck": ANY}, "environment: the player to move has no legal action"),
        ({"dies": ["7"]}, "environment: the scorer's process ended with exit code 3"),
        ({"sandbox": ANY}, "sandbox: no room"),
        ({"unsteady": True}, "environment: the same task and seed began differently"),
    ],
)
def test_environment_failures_are_contained_in_their_episodes(section: dict[str, Any], said: str) -> None:
    section = {"episodes": {"max_failures": 1.0}} | section
    section["episodes"] = {"max_failures": 1.0} | section["episodes"]
    everything = [episode for group in play(section, count=8) for episode in group]
    failed = [episode for episode in everything if episode.failure]
    assert 0 < len(failed) < len(everything) == 32
    assert all(episode.failure.startswith(said) for episode in failed)
    assert all(episode.reward is None and not episode.reward_terms for episode in failed)
    assert all(episode.reward is not None for episode in everything if not episode.failure)


def turns_are_retokenized(patch: pytest.MonkeyPatch) -> None:
    """The next turn continues the retokenized text."""
    patch.setattr(
        Trajectory,
        "context",
        lambda self: self.prompt_ids + TOKENIZER.encode(TOKENIZER.decode(self.token_ids)),
    )


def episode_is_retokenized(patch: pytest.MonkeyPatch) -> None:
    """The trained tokens are retokenized from the text."""
    right = RolloutWorker._episode

    def again(self: RolloutWorker, *args: Any) -> Episode:
        episode = right(self, *args)
        ids = np.array([*TOKENIZER.encode(TOKENIZER.decode(episode.token_ids)), *[1] * 99], np.int32)
        return replace(episode, token_ids=ids[: len(episode.token_ids)])

    patch.setattr(RolloutWorker, "_episode", again)


def observations_are_learned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trajectory, "mask", lambda self: np.ones(len(self.token_ids), np.bool_))


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (turns_are_retokenized, "continued other tokens: was its text tokenized again"),
        (episode_is_retokenized, "was its text tokenized again"),
        (observations_are_learned, r"a loss mask with token \d+, which the policy did not choose"),
    ],
)
def test_injected_bug_is_named(plant: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(WorkFailedError, match=said):
        play({})


def test_rl_with_several_turns_players_and_failed_episodes(tmp_path: Path) -> None:
    """All checks of a step are on: sampler against learner, masks, weights, and packing."""
    environment = {**TALK, "players": 2, "raises": [*"abcdefghijklmnop"]}
    bundle = run_task(tmp_path / "rl", "rl", environment=environment, steps=3, samples=6, max_tokens=80)
    timings = read_json_lines(bundle / "artifacts" / "timings.jsonl")
    assert all(0.1 < row["prefix_hits"] < 0.9 for row in timings)  # later turns find the earlier ones
    rows = episodes(bundle)
    assert (rows["failure"] != "").any() and rows["group_id"].str.endswith("/p1").any()
    lines = metrics(bundle)
    assert len(lines) == 3
    for line, (_, step) in zip(lines, rows.groupby("step"), strict=True):
        assert line["failures"] == line.get("failures/environment", 0) == (step["failure"] != "").sum()
        assert line["length"] == pytest.approx(step["loss_mask"].map(sum).mean())
    assert summary(bundle)["logprob_gap_max"] < 1e-3
    assert {figures_of(pairs)["turns"] for pairs in rows["metrics"]} > {1.0}


def test_evaluate_with_several_turns(tmp_path: Path) -> None:
    bundle = run_task(tmp_path / "evaluate", "evaluate", environment=TALK, tasks=4, samples=2, max_tokens=80)
    report = summary(bundle)
    assert report["tasks"] == 4 and "strategies" in report
    assert any(len(messages) > 3 for messages in episodes(bundle)["messages"])


def test_rl_tolerates_episodes_that_fail_before_their_first_turn(tmp_path: Path) -> None:
    """One episode of each group succeeds, and the others fail at the start. Includes a reference policy."""
    environment = {**TALK, "unsteady": True, "episodes": {"max_failures": 1.0}}
    options: dict[str, Any] = {"kl": 0.1, "steps": 2, "off_policy": {"level": "token"}}
    bundle = run_task(tmp_path / "rl", "rl", environment=environment, **options)
    rows = episodes(bundle)
    empty = rows["token_ids"].map(len) == 0
    assert empty.sum() == (rows["failure"] != "").sum() == 3 * len(rows) / 4
    assert metrics(bundle)[0]["failures/environment"] == 12


def test_rejection_sampling_traces_keep_every_turn(tmp_path: Path) -> None:
    options = {"tasks": 8, "samples": 4, "max_tokens": 60, "system": "hint"}
    environment = {**TALK, "turns": 2}
    bundle = run_task(tmp_path / "own", "rejection_sampling", environment=environment, **options)
    records = list(read_json_lines(bundle / "artifacts" / "traces" / "records.jsonl"))
    roles = [[message["role"] for message in record["messages"]] for record in records]
    assert roles and all(names == ["user", "user", "assistant", "tool", "assistant"] for names in roles)
    inputs = {"data": bundle / "artifacts" / "traces"}
    imitated = run_task(
        tmp_path / "sft", "sft", inputs=inputs, environment=environment, steps=2, batch_size=4
    )
    assert len(metrics(imitated)) == 2


def test_distill_with_several_turns(tmp_path: Path) -> None:
    bundle = run_task(
        tmp_path / "distill", "distill", environment=TALK, steps=2, system="hint", max_tokens=40
    )
    rows = episodes(bundle)
    lines = metrics(bundle)
    assert len(lines) == 2 and rows["loss_mask"].map(lambda mask: not all(mask)).any()


def test_pairs_refuse_multi_turn_environments(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="talk has several turns"):
        run_task(tmp_path / "pairs", "pairs", environment=TALK)


def test_interrupted_rl_with_two_players_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task has two groups."""
    environment = {**TALK, "players": 2}
    options: dict[str, Any] = {"environment": environment, "max_tokens": 40, "steps": 4, "save_every": 2}
    whole = run_task(tmp_path / "whole", "rl", **options)
    broken = make_bundle(tmp_path / "broken", make_job("rl", **options))
    right = StepRecorder.record

    def stops(self: StepRecorder, step: int, *args: Any) -> StepReport:
        if step == 3:
            raise KeyboardInterrupt
        return right(self, step, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(StepRecorder, "record", stops)
        run_in(broken)
    assert compare_artifacts(whole, run_in(broken)) == []


def test_calculator_stages_run_with_small_settings(tmp_path: Path) -> None:
    environment = {"id": "calculator"}
    bundle = run_task(tmp_path / "collect", "collect", environment=environment, teacher="calculator")
    traces = bundle / "artifacts" / "traces"
    sft = run_task(tmp_path / "sft", "sft", inputs={"data": traces}, environment=environment)
    checkpoint = {"checkpoint": sft / "artifacts" / "checkpoints" / "final"}
    trained = run_task(tmp_path / "rl", "rl", inputs=checkpoint, environment=environment, max_tokens=12)
    assert len(metrics(trained)) == 4
    judged = run_task(tmp_path / "evaluate", "evaluate", inputs=checkpoint, environment=environment)
    assert summary(judged)["environment"] == "calculator" and summary(judged)["failures"] == 0
