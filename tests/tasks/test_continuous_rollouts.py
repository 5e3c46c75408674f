"""Continuous rollouts give the same episodes as batch rollouts, in any order and after interruptions."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from threading import Event
from typing import Any

import numpy as np
import pytest
from task_environments import Talk
from test_several_turns import PARAMS, TALK, TOKENIZER, engine_of, play

from perilune.data.episode import Episode
from perilune.data.episodes_file import episodes_to_bytes
from perilune.data.routes import missing_rows
from perilune.engine.engine import Engine
from perilune.models.config.layer_kinds import Experts
from perilune.models.decoder import Decoder
from perilune.rollout.cache_admission import CacheAdmission
from perilune.rollout.continuous import ContinuousRollouts, Group, TurnTokens, VersionRuns
from perilune.rollout.groups import Groups
from perilune.rollout.worker import RolloutWorker
from perilune.verifiers import Scorer

SAMPLES = 4
TASKS = list(islice(Talk(TALK).tasks("train", 0), 6))


def mixture(seed: int = 0) -> Engine:
    """A mixture-of-experts engine that records routes."""
    config = engine_of(TOKENIZER)._config.replace(architecture="qwen3_moe", experts=Experts(4, 2, 32))
    decoder = Decoder(config)
    decoder.initialize(seed)
    engine = Engine(decoder)
    engine.record_routes()
    return engine


class Session:
    """Continuous rollouts of an engine, and their finished groups."""

    def __init__(self, engine: Engine, scorer: Scorer, section: dict[str, Any] = TALK) -> None:
        self.engine = engine
        self.finished: dict[tuple[int, int], Groups] = {}
        worker = RolloutWorker(engine, TOKENIZER, scorer, Talk(section), 7)
        self.rollouts = ContinuousRollouts(
            worker, PARAMS, SAMPLES, lambda group, groups: self.finished.update({group.key: groups})
        )

    def admit(self, *indices: int, **known: dict[int, object]) -> None:
        for index in indices:
            own = {name: values[index] for name, values in known.items()}
            self.rollouts.admit(Group((1, index), TASKS[index], **own))

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.rollouts.advance()

    def all(self, count: int) -> Groups:
        self.until(lambda: len(self.finished) == count)
        for thread in self.rollouts._threads:  # they close sessions, and the scorer is closed next
            closed = Event()
            thread._work.put(closed.set)
            assert closed.wait(60)
        return [group for key in sorted(self.finished) for group in self.finished[key]]


@pytest.fixture
def start() -> Iterator[Callable[[], Session]]:
    """Returns a function that starts a session with separate environment processes."""
    with ExitStack() as stack:
        yield lambda: Session(mixture(), stack.enter_context(Scorer(TALK, workers=2)))


def same(one: Groups, other: Groups) -> bool:
    return episodes_to_bytes(e for group in one for e in group) == episodes_to_bytes(
        e for group in other for e in group
    )


def version_runs_of(episode: Episode) -> VersionRuns:
    version_runs: VersionRuns = []
    for version in episode.policy_version[episode.loss_mask].tolist():
        if version_runs and version_runs[-1][0] == version:
            version_runs[-1] = (version, version_runs[-1][1] + 1)
        else:
            version_runs.append((version, 1))
    return version_runs


def test_continuous_rollouts_equal_batch_rollouts(start: Callable[[], Session]) -> None:
    session = start()
    session.admit(0, 3, 1)
    session.until(lambda: len(session.finished) >= 1)
    session.admit(2, 5, 4)
    groups = session.all(6)
    assert same(groups, play({}, engine=mixture()))
    for episode in (e for group in groups for e in group):
        assert episode.routed_experts is not None
        missing = missing_rows(episode.routed_experts)
        # Rows may be missing only after the last sampled token.
        assert not missing[: len(episode.prompt_ids) + int(np.flatnonzero(episode.loss_mask)[-1])].any()


def test_continuous_turns_end_at_their_own_limit() -> None:
    section = {**TALK, "most": 2}
    with Scorer(section, workers=2) as scorer:
        session = Session(mixture(), scorer, section)
        session.admit(*range(6))
        assert same(session.all(6), play({"most": 2}, engine=mixture()))


def session_with_swapped_weights(start: Callable[[], Session], after: int) -> Session:
    """A session whose engine gets other weights after `after` engine steps."""
    session = start()
    session.admit(*range(6))
    session.until(lambda: session.engine.counters.steps >= after)
    session.rollouts.update_weights(mixture(seed=1)._source.state_dict(), 1)
    return session


def test_episodes_are_reproducible_from_their_token_versions(start: Callable[[], Session]) -> None:
    first = session_with_swapped_weights(start, 5).all(6)
    versions = {tuple(v for v, _ in version_runs_of(episode)) for group in first for episode in group}
    assert (0, 1) in versions  # weights changed within an episode
    mixed = [episode for group in first for episode in group if len(version_runs_of(episode)) > 1]
    assert any(missing_rows(episode.routed_experts)[: len(episode.prompt_ids) + 5].any() for episode in mixed)

    version_runs = {index: [version_runs_of(e) for e in group] for index, group in enumerate(first)}
    again = start()
    again.admit(4, 0, 5, 3, 1, 2, version_runs=version_runs)
    again.until(lambda: again.rollouts.is_idle)
    again.rollouts.update_weights(mixture(seed=1)._source.state_dict(), 1)
    assert same(again.all(6), first)


def stored(samples: list[list[TurnTokens]]) -> list[list[TurnTokens]]:
    """The turns of a group after a JSON round trip, as in a checkpoint."""
    document = json.loads(json.dumps([[turn.to_json() for turn in turns] for turns in samples]))
    return [[TurnTokens.from_json(turn) for turn in turns] for turns in document]


@pytest.mark.parametrize("steps", [2, 9, 30])
def test_interrupted_episodes_continue_exactly(start: Callable[[], Session], steps: int) -> None:
    session = start()
    session.admit(*range(6))
    session.until(lambda: session.engine.counters.steps >= steps)
    recorded = {key[1]: stored(turns) for key, turns in session.rollouts.recorded().items()}
    assert any(turns for group in recorded.values() for turns in group)
    finished = dict(session.finished)

    other = start()
    other.finished = finished
    other.admit(*recorded, recorded=recorded)
    assert same(other.all(6), play({}, engine=mixture()))


def test_error_of_a_session_reaches_the_caller(start: Callable[[], Session]) -> None:
    session = start()
    lane = session.rollouts._threads[0]
    lane._work.put(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        session.rollouts.advance()


def test_groups_wait_for_room_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting, turns evict each other's cached context. The episodes stay the same."""
    long = {**TALK, "turns": 8}

    def computed(cache_tokens: int) -> tuple[Groups, int]:
        engine = Engine(engine_of(TOKENIZER)._source, cache_tokens=cache_tokens)
        with Scorer(long, workers=2) as scorer:
            session = Session(engine, scorer, long)
            session.admit(*range(6))
            return session.all(6), engine.counters.prompt_tokens

    groups, least = computed(16384)
    patient, tokens = computed(512)
    assert tokens == least
    monkeypatch.setattr(CacheAdmission, "has_room", lambda room, most: True)
    hasty, more = computed(512)
    assert more > least
    assert same(groups, patient) and same(groups, hasty)


def test_episodes_with_sub_agents_fail_and_others_continue() -> None:
    team = {"id": "factory", "factory": "task_environments:Team", "episodes": {"max_failures": 1.0}}
    with Scorer(team) as scorer:
        session = Session(engine_of(TOKENIZER), scorer, team)
        session.admit(0, 1)
        episodes = [episode for group in session.all(2) for episode in group]
    failed = [episode for episode in episodes if episode.failure]
    assert failed and all("cannot sample sub-agents yet" in episode.failure for episode in failed)
    assert all(e.truncated for e in episodes if not e.failure)  # truncated in the first turn
