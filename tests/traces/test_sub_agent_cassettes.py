"""Cassettes of episodes with sub-agents: exact replays, detected bugs of the harness, hostile files."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from trace_cases import NAME, TOKENIZER, suite_of, tokenizer_of

from perilune.data.episode import Episode
from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.environments import make_environment
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.errors import RequestError
from perilune.files import sha256_bytes
from perilune.rollout.groups import flatten
from perilune.rollout.rollout import Rollout
from perilune.rollout.timing import Stopwatch
from perilune.rollout.worker import RolloutWorker
from perilune.traces.cassette import Cassette
from perilune.traces.gate import run_suite
from perilune.traces.oracle import find_token_differences, make_expectation
from perilune.traces.record import Origin, record_episodes
from perilune.traces.replay import Replayer
from perilune.traces.shrink import Shrinker, has_same_cause
from perilune.traces.suite import Suite
from perilune.verifiers import Scorer

PARAMS = SamplingParams(200, 1.0, (TOKENIZER.eos_token_id,))
RECURSIVE = {
    "id": "recursive",
    "prompt": "compact",
    "turns": 3,
    "sandbox": {"memory_mb": 64, "processes": 1},
    "tasks": {"id": "oolong", "style": "compact", "lengths": [16], "kinds": ["counting"]},
}
SWARM = {"id": "wide_lookup", "keys": [2], "sub_agents": 4}
ASKS = "x=ask_all(C.split()[:3]);print(x)"
ANSWER = "answer.update(content=ask('z'),ready=1)"


def explore(text: str, turn: int, random: KeyedRandom) -> str:
    """The player asks about three lines, then for the answer. Answers to asks are random."""
    if not re.match(r"\d{7}\n", text):
        return random.choice(["A", "B", "C", "1", "2"])
    return [ASKS, ANSWER, "pass"][turn] + "#" * random.integer(4)


def look_up(text: str, turn: int, random: KeyedRandom) -> str:
    """The player spawns a sub-agent for each key and joins them. The sub-agents note random values."""
    if len(keys := text.split("\n", maxsplit=1)[0]) == 1:
        return f"?{keys}" if not turn else f"{keys}{random.integer(10)}\n."
    return ["\n".join(f"+{key}" for key in keys), "*", "."][turn]


@dataclass(frozen=True)
class Policy:
    """An engine that writes texts by a rule, with random numbers of the key of each prompt."""

    rule: Callable[[str, int, KeyedRandom], str]
    seed: int = 0
    positions: int | None = None

    def sample(self, prompts: Sequence[Prompt], n: int, *_: Any) -> list[list[Completion]]:
        return [[self._complete(prompt, sample) for sample in range(n)] for prompt in prompts]

    def _complete(self, prompt: Prompt, sample: int) -> Completion:
        turn = prompt.token_ids.count(TOKENIZER.eos_token_id)
        random = KeyedRandom(self.seed, f"{prompt.key}/{sample}")
        tokens = TOKENIZER.encode_completion(self.rule(TOKENIZER.decode(prompt.token_ids), turn, random))
        ids = np.array(tokens, np.int32)
        return Completion(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), "stop")


def play(section: dict[str, Any], policy: Policy) -> list[Episode]:
    environment = make_environment(section)
    with Scorer(section) as scorer:
        worker = RolloutWorker(policy, TOKENIZER, scorer, environment, 7)
        tasks = list(islice(environment.tasks("train", 0), 3))
        episodes = flatten(worker.play(tasks, samples=3, params=PARAMS, step=1, watch=Stopwatch()))
    environment.close()
    return episodes


def record(section: dict[str, Any], episodes: Sequence[Episode]) -> tuple[list[Cassette], dict[str, int]]:
    sampling = {
        "max_tokens": PARAMS.max_tokens,
        "temperature": 1.0,
        "stop_token_ids": PARAMS.stop_token_ids,
    }
    origin = Origin("r", "s", section, section, 0, sampling, NAME, None)
    with Replayer(tokenizer_of) as replayer:
        return record_episodes(episodes, "f", origin, replayer)


@pytest.fixture(scope="module")
def swarm() -> list[Cassette]:
    cassettes, refused = record(SWARM, play(SWARM, Policy(look_up)))
    assert not refused and len(cassettes) == 9
    return cassettes


@pytest.mark.parametrize(
    ("section", "rule", "order"),
    [
        (RECURSIVE, explore, ("0", "0.0", "0.1", "0.2", "0", "0.3")),
        (SWARM, look_up, ("0", "0", "0.0", "0.1", "0.0", "0.1", "0")),
    ],
    ids=["recursive", "swarm"],
)
def test_recorded_episodes_replay_exactly(section: dict[str, Any], rule: Any, order: tuple[str, ...]) -> None:
    cassettes, refused = record(section, play(section, Policy(rule)))
    assert not refused and [tape.order for tape in cassettes] == [order] * 9
    with Replayer(tokenizer_of) as replayer:
        same, scored = replayer.exact(cassettes, Policy(rule)), replayer.rescore(cassettes)
        other = replayer.exact(cassettes, Policy(rule, seed=1))
    for tape, again, rescored in zip(cassettes, same, scored, strict=True):
        assert not find_token_differences(tape.tracks, again.tracks)
        expected = [*map(make_expectation, tape.tracks)]
        assert not again.differences(expected) and not rescored.differences(expected)
    changed = [find_token_differences(a.tracks, b.tracks) for a, b in zip(cassettes, other, strict=True)]
    assert any("sub-agent" in difference.where for part in changed for difference in part)


def test_suite_detects_bugs_in_results_and_observations_of_sub_agents(
    swarm: list[Cassette], tmp_path: Path
) -> None:
    suite, take, observe = suite_of(swarm, tmp_path), Rollout.take, RolloutWorker._observe_agent
    report = run_suite(suite)
    assert not report.failed and report.change is not None

    def mixed_up(self: Rollout, sampled: Any) -> list[str]:
        own, *others = take(self, sampled)
        return [own, *others[::-1]] if self.due[0].is_own else [own, *others][::-1]

    def shortened(self: RolloutWorker, turn: Any, params: SamplingParams) -> None:
        cut = tuple({**message, "content": message["content"][:-2] + "\n"} for message in turn.messages)
        observe(self, replace(turn, messages=cut) if turn.trajectory.turns else turn, params)

    with mock.patch.object(Rollout, "take", mixed_up):
        failed = run_suite(suite).failed
        assert len(failed) == 9  # each sub-agent's actions reach the other one
        assert all(item.differences[0].where == "observation 2" for item in failed)
    with mock.patch.object(RolloutWorker, "_observe_agent", shortened):
        failed = run_suite(suite).failed
        assert len(failed) == 9
        places = [[difference.where for difference in item.differences] for item in failed]
        assert all("sub-agent 0 observation 1" in listed for listed in places)
    assert not run_suite(suite).failed


def test_shrinking_cuts_turns_of_sub_agents(swarm: list[Cassette]) -> None:
    tape = next(tape for tape in swarm if tape.tracks[0].verdict.reward == 0)
    with Replayer(tokenizer_of) as replayer:
        small = Shrinker(has_same_cause(tape), replayer).shrink(tape)
    assert small.tokens < tape.tokens and len(small.order) < len(tape.order)


def edited(cassette: Cassette, change: Callable[[dict[str, Any]], None], folder: Path) -> Suite:
    """A suite whose only cassette was changed, with a right digest."""
    suite = suite_of([cassette], folder)
    document = json.loads(cassette.to_bytes())
    change(document)
    data = json.dumps(document).encode()
    digest = sha256_bytes(data)
    (suite.root / "cassettes" / f"{digest}.json").write_bytes(data)
    index = json.loads((suite.root / "suite.json").read_bytes())
    index["cases"][0]["digest"] = digest
    (suite.root / "suite.json").write_text(json.dumps(index))
    return Suite(suite.root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tape: tape.update(order=["0", "0.9"]), "the agent '0.9' has no track"),
        (lambda tape: tape.update(order=["0"] * 4), "the agent 0 has 4 actions and 3 turns"),
        (lambda tape: tape["tracks"][1].update(agent="1"), "two tracks have the same player and agent"),
        (lambda tape: tape["tracks"][1].update(agent="0.0", player=1), "parent 1.0, which has no track"),
        (lambda tape: tape["tracks"][1].update(agent="0/../0"), "should match pattern"),
        (lambda tape: tape["tracks"][1].update(parent="0.1"), "tracks.1.parent: Extra inputs"),
        (lambda tape: tape.update(schema_version=1), "schema 1, and this version reads schema 2"),
    ],
)
def test_hostile_cassettes_are_refused(
    swarm: list[Cassette], tmp_path: Path, change: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        _ = edited(swarm[0], change, tmp_path).cassettes


@pytest.mark.parametrize("token", [-1, TOKENIZER.vocab_size, 2**40])
def test_tokens_outside_the_vocabulary_are_refused(swarm: list[Cassette], tmp_path: Path, token: int) -> None:
    suite = edited(swarm[0], lambda tape: tape["tracks"][2]["turns"][0]["tokens"].append(token), tmp_path)
    (result,) = run_suite(suite).failed
    assert "agent 0.1, turn 1: a token is outside the vocabulary" in str(result.differences[0])


def test_episodes_of_earlier_versions_are_refused() -> None:
    played = play(SWARM, Policy(look_up))
    spans = [tuple(replace(span, token_ids=(), loss_mask=()) for span in one.spans) for one in played]
    tokenless = [replace(one, spans=own) for one, own in zip(played, spans, strict=True)]
    cassettes, refused = record(SWARM, tokenless)
    assert not cassettes and [*refused.values()] == [9] and "earlier version" in next(iter(refused))
