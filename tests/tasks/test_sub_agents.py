"""Sub-agents: batched sampling, spans, and optional training."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from task_cases import episodes, figures_of, make_job, metrics, run_task, summary
from task_environments import Beside, Team, Wordless
from test_several_turns import ENDS, PARAMS, TOKENIZER, Recording, engine_of

from perilune.data.episode import Episode
from perilune.data.episodes_file import read_episodes, write_episodes
from perilune.data.spans import critical_steps, total_steps
from perilune.engine.request import Completion
from perilune.environments import Task, Transcript, make_environment
from perilune.errors import RequestError
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.groups import Groups, flatten
from perilune.rollout.rollout import DueTurn
from perilune.rollout.sub_agents import SubAgents
from perilune.rollout.timing import Stopwatch
from perilune.rollout.worker import RolloutWorker, session_seed
from perilune.tasks.rl.spec import RLSpec
from perilune.tasks.rl.stage import plugin
from perilune.traces.oracle import find_token_differences, make_expectation
from perilune.traces.record import Origin, record_episodes
from perilune.traces.replay import Replayer, apply_replay
from perilune.traces.tape import NoEngine
from perilune.verifiers import Scorer

TEAM = {"id": "factory", "factory": "task_environments:Team"}
ORIGIN = Origin(
    run="r",
    stage="s",
    environment=TEAM,
    section=TEAM,
    seed=0,
    sampling={"max_tokens": PARAMS.max_tokens, "temperature": 1.0, "stop_token_ids": ENDS},
    tokenizer="t",
    checkpoint=None,
)


def play(
    count: int = 5, *, engine: Recording | None = None, skip: int = 0, sub_agents: SubAgents | None = None
) -> tuple[Groups, dict[str, Task]]:
    environment = Team(TEAM)
    tasks = list(islice(environment.tasks("train", 0), skip, skip + count))
    with Scorer(TEAM) as scorer:
        rollouts = RolloutWorker(
            engine or engine_of(TOKENIZER),
            TOKENIZER,
            scorer,
            environment,
            7,
            sub_agents=sub_agents or SubAgents(),
        )
        groups = rollouts.play(tasks, samples=4, params=PARAMS, step=1, watch=Stopwatch(), first=skip)
    return groups, {task.task_id: task for task in tasks}


def longest_path(stages: list[list[tuple[int, int]]]) -> int:
    """The published formula: turns of the player plus those of the longest sub-agent of each stage."""
    return 1 + sum(1 + max(turns + nested for turns, nested in stage) for stage in stages)


def play_lookup(script: Mapping[str, Sequence[str]]) -> Episode:
    """An episode of wide_lookup in which each agent takes the turns of the script, by id. K is a key."""
    section = {"id": "wide_lookup", "keys": [2], "sub_agents": 4}
    environment = make_environment(section)
    task = next(environment.tasks("train", 0))
    (key, *_), tokenizer = task.data["values"], Tokenizer.byte_level()

    class Scripted(RolloutWorker):
        def sample_turns(self, turns: Sequence[DueTurn], *_: Any) -> list[Completion]:
            texts = [script[turn.agent][len(turn.trajectory.turns)].replace("K", key) for turn in turns]
            tokens = [np.array(tokenizer.encode_completion(text), np.int32) for text in texts]
            return [
                Completion(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), "stop")
                for ids in tokens
            ]

    with Scorer(section) as scorer:
        worker = Scripted(NoEngine(None), tokenizer, scorer, environment, 7)
        ((episode,),) = worker.play([task], samples=1, params=PARAMS, step=1, watch=Stopwatch())
    return episode


def test_result_is_joined_in_the_turn_that_receives_it() -> None:
    readers = {str(number): ["?K", "."] for number in range(2)}
    late = play_lookup({"": ["+K", "?K", "?K", "*", "+K\n*", "."], **readers})
    assert [span.rounds for span in late.spans] == [(0, 1, 2, 3, 4, 7), (1, 2), (5, 6)]
    assert [span.joined for span in late.spans] == [-1, 4, 7]
    never = play_lookup({"": ["+K", "?K", "?K", "?K", "."], **readers})
    assert [span.joined for span in never.spans] == [-1, -1] and never.spans[1].end < never.spans[0].end


def is_complete(one: Episode) -> bool:
    return not one.truncated


def test_critical_steps_match_the_published_formula() -> None:
    groups, tasks = play()
    whole = [episode for group in groups for episode in group if is_complete(episode)]
    assert len(whole) > 8
    for episode in whole:
        stages = Team.stages(tasks[episode.task_id])
        assert critical_steps(episode.spans) == episode.metrics["critical_steps"] == longest_path(stages)
        turns = sum(turns + nested for stage in stages for turns, nested in stage)
        assert total_steps(episode.spans) == 1 + len(stages) + turns == episode.metrics["total_steps"]
        by_id = {span.span_id: span for span in episode.spans}
        for span in episode.spans[1:]:
            parent = by_id[span.parent]
            assert parent.begin < span.begin < span.end
            turns = [number for number in parent.rounds if number >= span.end]
            assert span.joined == next(iter(turns), -1)  # a parent waits for the sub-agents of a stage


def test_all_due_turns_are_sampled_in_one_call() -> None:
    engine = engine_of(TOKENIZER)
    calls = []
    right = engine.sample
    engine.sample = lambda prompts, *args: calls.append(len(prompts)) or right(prompts, *args)  # type: ignore[method-assign,assignment,func-returns-value]
    groups, tasks = play(1, engine=engine)
    stages = Team.stages(*tasks.values())
    assert len(calls) == longest_path(stages)
    assert max(calls) > len(groups[0])


def test_episode_is_independent_of_other_episodes() -> None:
    whole, _ = play()
    part, _ = play(2, skip=2)
    for group, again in zip(whole[2:4], part, strict=True):
        for episode, other in zip(group, again, strict=True):
            assert episode.spans == other.spans and episode.reward == other.reward
            assert np.array_equal(episode.token_ids, other.token_ids)


def test_no_two_turns_share_random_numbers() -> None:
    engine = engine_of(TOKENIZER)
    play(engine=engine)
    drawn = [(prompt.key, sample) for prompt, answers in engine.log for sample in range(len(answers))]
    assert len(set(drawn)) == len(drawn) > 100
    assert all(0 <= lane < 2**32 for (_, *lanes), _ in drawn for lane in lanes)


def actions_of(one: Episode, task: Task, seed: int) -> list[str]:
    """The actions of an episode in the order of the environment's requests."""
    texts = {
        span.span_id: iter(
            [turn["content"] for turn in (span.messages or one.messages) if turn["role"] == "assistant"]
        )
        for span in one.spans
    }
    session = Team(TEAM).reset(task, seed)
    actions = []
    while (due := session.observation.due) and not session.observation.done:
        actions.append(next(texts[f"0.{due[0].agent}" if due[0].agent else "0"]))
        session.step(actions[-1])
    return actions


def test_score_reproduces_the_reward_from_the_transcript() -> None:
    groups, tasks = play()
    for episode in (e for group in groups for e in group if is_complete(e)):
        step, index = map(int, episode.group_id.split("/"))
        seed = session_seed((episode.seed, step, index))
        *earlier, last = actions_of(episode, tasks[episode.task_id], seed)
        transcript = Transcript(last, earlier=tuple(earlier), seed=seed)
        assert Team(TEAM).score(tasks[episode.task_id], transcript).reward == episode.reward


def test_spans_round_trip_through_parquet(tmp_path: Path) -> None:
    groups, _ = play()
    everything = [episode for group in groups for episode in group]
    write_episodes(tmp_path / "a.parquet", everything)
    assert [e.spans for e in read_episodes(tmp_path / "a.parquet")] == [e.spans for e in everything]


def test_frozen_policy_samples_the_sub_agents() -> None:
    frozen, policy = engine_of(TOKENIZER, seed=3), engine_of(TOKENIZER)
    groups, _ = play(engine=policy, sub_agents=SubAgents(frozen))
    spans = [span for group in groups for episode in group for span in episode.spans[1:]]
    assert len(frozen.log) == sum(len(span.rounds) for span in spans) > 50
    own = {tuple(prompt.token_ids) for prompt, _ in policy.log}
    assert not own & {tuple(prompt.token_ids) for prompt, _ in frozen.log}


def test_trained_sub_agents_get_the_reward_of_their_player() -> None:
    groups, _ = play(sub_agents=SubAgents(trained=True))
    for own, parts in zip(groups[::2], groups[1::2], strict=True):
        assert parts[0].group_id == f"{own[0].group_id}/agents"
        by_sample = {episode.episode_id.rpartition("/")[2]: episode for episode in own}
        spans = {}
        for episode in own:
            sample = episode.episode_id.rpartition("/")[2]
            spans |= {f"{sample}.{span.span_id[2:]}": span for span in episode.spans[1:]}
        assert {episode.episode_id.rpartition("/")[2] for episode in parts} == {*spans}
        for episode in parts:
            name = episode.episode_id.rpartition("/")[2]
            assert episode.reward == by_sample[name.partition(".")[0]].reward
            assert episode.messages == spans[name].messages and episode.sampled == spans[name].tokens


def test_sub_agent_without_room_has_an_empty_action(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        RolloutWorker, "_fits_context", lambda self, trajectory, params: trajectory.name != "part"
    )
    groups, tasks = play(2)
    whole = [episode for group in groups for episode in group if is_complete(episode)]
    assert whole
    for episode in whole:
        assert not episode.failure and not any(span.tokens for span in episode.spans[1:])
        share = sum(
            any(map(str.isdigit, turn["content"])) for turn in episode.messages if turn["role"] == "assistant"
        )
        stages = Team.stages(tasks[episode.task_id])
        assert episode.reward == share / (
            1 + len(stages) + sum(map(sum, (turns for stage in stages for turns in stage)))
        )


FOLDED: dict[str, Any] = {
    "id": "factory",
    "factory": "task_environments:Long",
    "context": {"rule": "fold", "above": 8, "last": 0},
}


def play_folded(max_tokens: int, **episodes: int) -> list[Episode]:
    """Players first, then their later contexts."""
    section = {**FOLDED, "episodes": episodes}
    environment = make_environment(section)
    tasks = list(islice(environment.tasks("train", 0), 2))
    with Scorer(section) as scorer:
        agents = SubAgents(trained=True)
        rollouts = RolloutWorker(engine_of(TOKENIZER), TOKENIZER, scorer, environment, 7, sub_agents=agents)
        params = replace(PARAMS, max_tokens=max_tokens)
        return flatten(rollouts.play(tasks, samples=4, params=params, step=1, watch=Stopwatch()))


def test_player_cut_off_in_a_later_context_is_truncated() -> None:
    played = play_folded(8)
    players = {e.episode_id: e for e in played if not e.is_sub_agent}
    last = {e.episode_id.replace("/agents", "").rpartition(".")[0]: e for e in played if e.is_sub_agent}
    assert {e.truncated for e in last.values()} == {True, False}
    assert all(players[key].truncated == e.truncated for key, e in last.items())


def test_player_without_room_in_a_later_context_is_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        RolloutWorker, "_fits_context", lambda self, trajectory, params: trajectory.name != "context"
    )
    played = play_folded(24)
    assert len(played) == 8 and all(e.truncated and e.spans[1].tokens == 0 for e in played)


def test_max_turns_of_an_episode_counts_the_turns_of_all_contexts() -> None:
    played = play_folded(24, max_turns=2)
    players = [episode for episode in played if not episode.is_sub_agent]
    turns = [e.metrics["turns"] + sum(len(span.rounds) for span in e.spans[1:]) for e in players]
    assert max(turns) == 2 and all(e.truncated for e in players)
    assert any(len(e.spans) > 1 and e.spans[1].tokens for e in players)  # the limit ends a later context


def test_sub_agent_without_room_for_another_turn_is_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        RolloutWorker,
        "_fits_context",
        lambda self, trajectory, params: trajectory.name != "part" or not trajectory.turns,
    )
    groups, _ = play(2, sub_agents=SubAgents(trained=True))
    parts = [episode for group in groups for episode in group if episode.is_sub_agent]
    assert any(
        e.truncated and e.token_ids[e.loss_mask][-1] in ENDS for e in parts
    )  # its only turn was complete
    assert not all(e.truncated for e in parts)


def test_empty_prompts_fail_only_their_episodes() -> None:
    section = {"id": "factory", "factory": "task_environments:Wordless"}
    environment = Wordless(section)
    tasks = list(islice(environment.tasks("train", 0), 4))
    with Scorer(section) as scorer:
        rollouts = RolloutWorker(engine_of(TOKENIZER), TOKENIZER, scorer, environment, 7)
        groups = rollouts.play(tasks, samples=4, params=PARAMS, step=1, watch=Stopwatch())
    complete = [[episode for episode in group if is_complete(episode)] for group in groups]
    assert all(episode.reward == 1 for group in complete[::2] for episode in group) and any(complete[::2])
    failures = {episode.failure for group in groups[1::2] for episode in group}
    assert failures == {"environment: the prompt has no tokens"}


def test_truncated_turn_ends_the_episode_and_its_sub_agents() -> None:
    section = {"id": "factory", "factory": "task_environments:Beside"}
    environment = Beside(section)
    tasks = list(islice(environment.tasks("train", 0), 2))
    with Scorer(section) as scorer:
        rollouts = RolloutWorker(engine_of(TOKENIZER), TOKENIZER, scorer, environment, 7)
        groups = rollouts.play(
            tasks, samples=4, params=replace(PARAMS, max_tokens=8), step=1, watch=Stopwatch()
        )
    cut = [episode for group in groups for episode in group if episode.truncated]
    assert cut and not any(episode.failure for group in groups for episode in group)
    assert all(len(e.spans) == 2 and e.spans[0].rounds == e.spans[1].rounds for e in cut)


def test_episodes_with_sub_agents_replay_exactly() -> None:
    engine = engine_of(TOKENIZER)
    groups, _ = play(engine=engine, sub_agents=SubAgents(trained=True))
    own = [episode for group in groups for episode in group if not episode.is_sub_agent]
    with Replayer(lambda _: TOKENIZER) as replayer:
        cassettes, refused = record_episodes(flatten(groups), "f", ORIGIN, replayer)
        again = replayer.exact(cassettes, engine)
        other = replayer.exact(cassettes, engine_of(TOKENIZER, 1))
        rescored = replayer.rescore(cassettes)
    assert not refused and len(cassettes) == len(own)
    assert max(len(tape.tracks) for tape in cassettes) > 3
    for tape, replay, changed, scored in zip(cassettes, again, other, rescored, strict=True):
        expected = [*map(make_expectation, tape.tracks)]
        assert not replay.error and replay.order == tape.order
        assert not find_token_differences(tape.tracks, replay.tracks) and not replay.differences(expected)
        assert find_token_differences(tape.tracks, changed.tracks) and not scored.differences(expected)


@pytest.mark.parametrize("folded", [True, False])
def test_later_contexts_and_refused_sub_agents_replay(monkeypatch: pytest.MonkeyPatch, folded: bool) -> None:
    if folded:
        played, origin = play_folded(24), replace(ORIGIN, environment=FOLDED, section=FOLDED)
    else:
        monkeypatch.setattr(
            RolloutWorker, "_fits_context", lambda self, trajectory, params: trajectory.name != "part"
        )
        played, origin = flatten(play(2)[0]), ORIGIN
    with Replayer(lambda _: TOKENIZER) as replayer:
        cassettes, refused = record_episodes(played, "f", origin, replayer)
        again = replayer.exact(cassettes, engine_of(TOKENIZER))
        rescored = replayer.rescore(cassettes)
    assert not refused and len(cassettes) == 8
    assert any("" in tape.order for tape in cassettes) != folded
    assert any(track.agent and track.turns for tape in cassettes for track in tape.tracks) == folded
    for tape, replay, scored in zip(cassettes, again, rescored, strict=True):
        expected = [*map(make_expectation, tape.tracks)]
        assert not find_token_differences(tape.tracks, replay.tracks)
        assert not replay.differences(expected) and not scored.differences(expected)


def test_fork_keeps_the_actions_before_it() -> None:
    engine = engine_of(TOKENIZER)
    groups, _ = play(1, engine=engine)
    with Replayer(lambda _: TOKENIZER) as replayer:
        cassettes, _ = record_episodes(flatten(groups), "f", ORIGIN, replayer)
        tape = max(cassettes, key=lambda one: len(one.order))
        first = next(index for index, agent in enumerate(tape.order) if "." in agent)
        forks = replayer.fork(tape, first + 1, 4, engine)
    drawn = set()
    for sample, fork in enumerate(forks):
        played = apply_replay(tape, fork)
        assert [turn.tokens for turn in played.actions()[: first + 1]] == [
            turn.tokens for turn in tape.actions()[: first + 1]
        ]
        assert (played.actions() == tape.actions()) == (sample == tape.sampling.sample)
        drawn.add(tuple(turn.tokens for turn in played.actions()))
    assert len(drawn) == 4


@pytest.mark.parametrize("trained", [False, True])
def test_rl_with_sub_agents(tmp_path: Path, trained: bool) -> None:
    bundle = run_task(
        tmp_path,
        "rl",
        environment=TEAM,
        steps=2,
        prompts=3,
        samples=4,
        max_tokens=80,
        train_sub_agents=trained,
    )
    rows = episodes(bundle)
    own = rows[~rows["group_id"].str.endswith("/agents")]
    assert (len(own) < len(rows)) == trained
    assert summary(bundle)["logprob_gap_max"] < 1e-5
    for line, (_, step) in zip(metrics(bundle), own.groupby("step"), strict=True):
        assert line["reward"] == pytest.approx(step["reward"].mean())
        assert line["groups"] == 3
    assert any("sub_agents" in figures_of(pairs) for pairs in own["metrics"])


def test_rl_trains_every_context_of_a_folded_episode(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "steps": 2,
        "prompts": 3,
        "samples": 4,
        "max_tokens": 6,
    }
    bundle = run_task(tmp_path, "rl", environment=FOLDED, train_sub_agents=True, **options)
    rows = episodes(bundle)
    later = rows[rows["group_id"].str.endswith("/agents")]
    assert 0 < len(later) < len(rows) and summary(bundle)["logprob_gap_max"] < 1e-5
    assert set(later["reward"]) <= set(rows["reward"]) and later["loss_mask"].map(any).all()
    with pytest.raises(RequestError, match="would not learn in them"):
        plugin.describe(RLSpec(checkpoint="sft", **options), make_job("rl", environment=FOLDED))


def test_sub_agent_checkpoint_replaces_the_sub_agent_policy(tmp_path: Path) -> None:
    first = run_task(tmp_path / "first", "rl", environment=TEAM, steps=2, prompts=3, samples=4, max_tokens=80)
    inputs = {"sub_agent_checkpoint": first / "artifacts" / "checkpoints" / "final"}
    options = {"environment": TEAM, "tasks": 4, "samples": 2, "max_tokens": 80}
    own = run_task(tmp_path / "own", "evaluate", **options)
    frozen = run_task(tmp_path / "frozen", "evaluate", inputs=inputs, sub_agent_checkpoint="first", **options)
    own_texts = [[span["messages"].tolist() for span in spans[1:]] for spans in episodes(own)["spans"]]
    frozen_texts = [[span["messages"].tolist() for span in spans[1:]] for spans in episodes(frozen)["spans"]]
    assert [len(texts) for texts in own_texts] != [] and own_texts != frozen_texts
    inputs |= {"checkpoint": inputs["sub_agent_checkpoint"]}
    both = {"checkpoint": "first", "sub_agent_checkpoint": "first"}
    same = run_task(tmp_path / "same", "evaluate", inputs=inputs, **both, **options)
    assert (
        episodes(same)["spans"].map(len).sum() > 0
    )  # sub-agents from a checkpoint still run when the policy is the same checkpoint
