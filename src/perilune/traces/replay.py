"""Plays cassettes again.

`replay_harness` takes the model's turns from the tape and runs everything else: chat template, tokenizer,
parsers, tools, environment and rewards. `rescore` runs the verifier alone. `fork` takes the turns before one
turn from the tape, and samples the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from perilune.data.episode import Episode
from perilune.engine.backend import SamplingBackend
from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.environments.core.protocol import Failure, Outcome, Transcript
from perilune.environments.core.registry import make_environment
from perilune.errors import PeriluneError, RequestError, WorkFailedError
from perilune.files import canonical_json
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.rollout import Rollout
from perilune.rollout.timing import Stopwatch
from perilune.rollout.worker import Progress, RolloutWorker, session_seed
from perilune.traces.cassette import Cassette, Track, track_of
from perilune.traces.oracle import Difference, Expectation, differences, expectation
from perilune.verifiers import Scorer
from perilune.verifiers.sessions import Sessions

MOST_AT_ONCE = 256  # sessions that are open together
TokenizerOf = Callable[[str], Tokenizer]
"""Loads the tokenizer with a digest."""


@dataclass(frozen=True)
class Replay:
    """What playing a cassette gave.

    Attributes:
        tracks: the players' parts, as in the cassette.
        order: the player of each action.
        error: why the replay stopped; "" if it did not.
    """

    tracks: tuple[Track, ...] = ()
    order: tuple[int, ...] = ()
    error: str = ""

    def differences(self, expected: Sequence[Expectation]) -> list[Difference]:
        """How the replay differs from what is expected."""
        if self.error:
            return [Difference("error", "replay", "", self.error)]
        return differences(expected, self.expectations())

    def expectations(self) -> tuple[Expectation, ...]:
        """What the replay gave, as an expectation of the next one."""
        return tuple(map(expectation, self.tracks))


def as_played(cassette: Cassette, replay: Replay) -> Cassette:
    """The cassette with what the replay gave in place of what was recorded."""
    return cassette.model_copy(update={"tracks": replay.tracks, "order": replay.order})


class NoEngine:
    """An engine that only knows the context window: every turn is on the tape."""

    def __init__(self, positions: int | None) -> None:
        self._positions = positions

    @property
    def positions(self) -> int | None:
        """Most tokens of prompt and sample together."""
        return self._positions

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        on_progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """Refuse: there is no model.

        Raises:
            WorkFailedError: always.
        """
        raise WorkFailedError("a replay without a model asked for a sample", remedy="give a checkpoint")


@dataclass(frozen=True)
class TapedWorker(RolloutWorker):
    """A rollout worker whose turns come from tapes.

    Attributes:
        tapes: the cassette of each rollout.
        until: sample from the engine after this many actions of an episode; None: never. A turn that the tape
            lacks is then aborted, which ends the episode.
        order: the players of each rollout's actions; filled while it plays.
    """

    tapes: dict[Rollout, Cassette] = field(default_factory=dict)
    until: int | None = None
    order: dict[Rollout, list[int]] = field(default_factory=dict)

    def sample_turns(
        self,
        due: Sequence[Rollout],
        contexts: Sequence[list[int]],
        samples: int,
        params: SamplingParams,
        progress: Progress,
    ) -> list[Completion]:
        """The next turn of each rollout: from its tape, or sampled."""
        found: dict[Rollout, Completion] = {}
        for one in due:
            self.order.setdefault(one, []).append(one.observation.player)
            if self.until is None or len(one.actions) < self.until:
                found[one] = self._taped(one)
        live = [(one, context) for one, context in zip(due, contexts, strict=True) if one not in found]
        if live:
            parts = [list(part) for part in zip(*live, strict=True)]
            sampled = super().sample_turns(parts[0], parts[1], samples, params, progress)
            found |= dict(zip(parts[0], sampled, strict=True))
        return [found[one] for one in due]

    def _taped(self, rollout: Rollout) -> Completion:
        track = self.tapes[rollout].track(rollout.observation.player)
        number = len(rollout.trajectory.turns)
        turn = track.turns[number] if track is not None and number < len(track.turns) else None
        count = len(turn.tokens) if turn else 0
        ending = "aborted" if turn is None else "stop" if turn.finished else "length"
        return Completion(
            np.array(turn.tokens if turn else (), np.int32),
            np.zeros(count, np.float32),
            np.zeros(count, np.int32),
            ending,  # type: ignore[arg-type]
        )


def replay_harness(cassettes: Sequence[Cassette], tokenizer_of: TokenizerOf) -> list[Replay]:
    """Play cassettes with the model's turns from the tape. Returns one replay each, in order."""

    def play(batch: Sequence[Cassette]) -> list[Replay]:
        engine = NoEngine(batch[0].sampling.positions)
        with _worker(batch[0], tokenizer_of, engine) as worker:
            return _played(worker, batch)

    return _batched(cassettes, play)


def replay_exact(
    cassettes: Sequence[Cassette], engine: SamplingBackend, tokenizer_of: TokenizerOf
) -> list[Replay]:
    """Play cassettes with a live model: the same weights and keys give the same tokens."""

    def play(batch: Sequence[Cassette]) -> list[Replay]:
        with _worker(batch[0], tokenizer_of, engine, until=0) as worker:
            return _played(worker, batch)

    return _batched(cassettes, play)


def fork(
    cassette: Cassette, turn: int, samples: int, engine: SamplingBackend, tokenizer_of: TokenizerOf
) -> list[Replay]:
    """Play the first `turn` actions from the tape, and sample the others `samples` times.

    Sample i draws the random numbers of sample i of the cassette's task.

    Raises:
        RequestError: when the tape has fewer actions.
    """
    if turn >= len(cassette.order):
        raise RequestError(
            f"the episode has {len(cassette.order)} turns, so a fork after turn {turn} has none to sample",
            where=cassette.source.episode_id,
            remedy=f"fork after turn 0 to {len(cassette.order) - 1}",
        )
    with _worker(cassette, tokenizer_of, engine, turn) as worker:
        return _played(worker, [cassette] * samples, range(samples))


def rescore(cassettes: Sequence[Cassette]) -> list[Replay]:
    """Score recorded episodes again, without playing them. Episodes that failed, or in which nobody moved,
    are returned as they are.
    """

    def score(batch: Sequence[Cassette]) -> list[Replay]:
        scored = [one for one in batch if one.order and not any(t.verdict.failure for t in one.tracks)]
        items = [(one.task.task(), _transcript(one, track.player)) for one in scored for track in one.tracks]
        with Scorer(batch[0].environment) as scorer:
            outcomes = iter(scorer.score(items))
        verdicts = {
            one.digest: [_with_outcome(track, next(outcomes)) for track in one.tracks] for one in scored
        }
        return [Replay(tuple(verdicts.get(one.digest, one.tracks)), one.order) for one in batch]

    return _batched(cassettes, score)


def batches(cassettes: Iterable[Cassette]) -> Iterator[list[Cassette]]:
    """Cassettes of the same run, environment and sampling settings, which can be played together."""

    def kind(one: Cassette) -> bytes:
        shared = one.sampling.model_dump(exclude={"key", "sample"})
        return canonical_json([one.source.run, one.source.file, one.environment, one.tokenizer, shared])

    for _, group in groupby(sorted(cassettes, key=kind), key=kind):
        members = list(group)
        for start in range(0, len(members), MOST_AT_ONCE):
            yield members[start : start + MOST_AT_ONCE]


def _batched(
    cassettes: Sequence[Cassette], play: Callable[[Sequence[Cassette]], list[Replay]]
) -> list[Replay]:
    found: dict[str, Replay] = {}
    for batch in batches({one.digest: one for one in cassettes}.values()):
        found |= zip([one.digest for one in batch], _attempt(batch, play), strict=True)
    return [found[one.digest] for one in cassettes]


def _attempt(batch: Sequence[Cassette], play: Callable[[Sequence[Cassette]], list[Replay]]) -> list[Replay]:
    """Play a batch. If it cannot be played, play its cassettes one by one and record why each stopped."""
    try:
        return play(batch)
    except Exception as error:  # whatever the harness raises is a finding, and must not hide the others
        if len(batch) > 1:
            return [replay for one in batch for replay in _attempt([one], play)]
        why = error.what if isinstance(error, PeriluneError) else f"{type(error).__name__}: {error}"
        return [Replay(error=why)]


@contextmanager
def _worker(
    first: Cassette, tokenizer_of: TokenizerOf, engine: SamplingBackend, until: int | None = None
) -> Iterator[TapedWorker]:
    environment = make_environment(first.environment, checked=False)
    with Scorer(first.environment) as scorer:
        seed = first.sampling.key[0]
        yield TapedWorker(engine, tokenizer_of(first.tokenizer), scorer, environment, seed, until=until)


def _played(
    worker: TapedWorker, cassettes: Sequence[Cassette], samples: Sequence[int] | None = None
) -> list[Replay]:
    """Play cassettes that share the worker's settings.

    Args:
        samples: sample numbers in place of the cassettes' own.
    """
    sampling = cassettes[0].sampling
    params = SamplingParams(sampling.max_tokens, sampling.temperature, sampling.stop_token_ids)
    sessions = Sessions(worker.scorer.processes, worker.environment)
    opened = sessions.open([(one.task.task(), session_seed(one.sampling.key)) for one in cassettes])
    rollouts = []
    for place, (one, session) in enumerate(zip(cassettes, opened, strict=True)):
        sample = one.sampling.sample if samples is None else samples[place]
        rollout = worker.new_rollout(one.sampling.key, sample, session)
        rollout.advance()
        worker.tapes[rollout] = one
        rollouts.append(rollout)
    most = 1 + max(one.sample for one in rollouts)
    worker.play_out(sessions, rollouts, params, samples=most, watch=Stopwatch())
    return [_replay(worker, rollout, params) for rollout in rollouts]


def _replay(worker: TapedWorker, rollout: Rollout, params: SamplingParams) -> Replay:
    sampling = worker.tapes[rollout].sampling
    stop = worker.with_stop(params, rollout.task).stop
    tracks = []
    for player in range(rollout.players):
        for episode in worker.group([rollout], player, params):
            tracks.append(track_of(_as_recorded(episode), player, sampling, stop))
    return Replay(tuple(tracks), tuple(worker.order.get(rollout, ())))


def _as_recorded(episode: Episode) -> Episode:
    """The episode without a turn that the tape lacked, which has no tokens."""
    if episode.finish_reason != "aborted":
        return episode
    return replace(episode, messages=episode.messages[:-1])


def _transcript(cassette: Cassette, player: int) -> Transcript:
    *earlier, last = cassette.actions()
    return Transcript(
        last.text,
        last.finished,
        tuple(one.text for one in earlier),
        session_seed(cassette.sampling.key),
        player,
    )


def _with_outcome(track: Track, outcome: Outcome) -> Track:
    """The track with another score. Terms that a cut-off episode did not have are left out."""
    if isinstance(outcome, Failure):
        failed: dict[str, Any] = {
            "reward": None,
            "terms": {},
            "failure": f"{outcome.boundary}: {outcome.reason}",
        }
        return track.model_copy(update={"verdict": track.verdict.model_copy(update=failed)})
    is_cut = track.verdict.finish_reason == "length"
    terms = {name: one for name, one in outcome.terms.items() if name in track.verdict.terms or not is_cut}
    scored = track.verdict.model_copy(update={"reward": outcome.reward, "terms": terms})
    return track.model_copy(update={"verdict": scored})
