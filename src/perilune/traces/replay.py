"""Plays cassettes again.

`Replayer.harness` takes the model's turns from the tape and runs everything else: chat template, tokenizer,
parsers, tools, environment and rewards. `rescore` runs the verifier alone. `exact` samples all turns, and
`fork` those after some turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from perilune.data.episode import Episode
from perilune.engine.backend import SamplingBackend
from perilune.engine.request import SamplingParams
from perilune.environments.core.protocol import Failure, Outcome, Transcript
from perilune.environments.core.registry import make_environment
from perilune.errors import PeriluneError, RequestError
from perilune.files import canonical_json
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.rollout import Rollout
from perilune.rollout.timing import Stopwatch
from perilune.rollout.worker import session_seed
from perilune.traces.cassette import Cassette, Track, extract_tracks
from perilune.traces.oracle import Difference, Expectation, find_differences, make_expectation
from perilune.traces.tape import NoEngine, TapedWorker
from perilune.verifiers import Scorer
from perilune.verifiers.sessions import Sessions

MAX_BATCH_SIZE = 256  # sessions that are open together
TokenizerOf = Callable[[str], Tokenizer]
"""Loads the tokenizer with a digest."""


@dataclass(frozen=True)
class Replay:
    """The result of playing a cassette.

    Attributes:
        tracks: the parts of players and sub-agents, as in the cassette.
        order: the agent of each action, as in the cassette.
        error: the reason why the replay stopped; "" if it played to the end.
    """

    tracks: tuple[Track, ...] = ()
    order: tuple[str, ...] = ()
    error: str = ""

    def differences(self, expected: Sequence[Expectation]) -> list[Difference]:
        if self.error:
            return [Difference("error", "replay", "", self.error)]
        return find_differences(expected, self.expectations())

    def expectations(self) -> tuple[Expectation, ...]:
        """Return the result as the expectations of the next replay."""
        return tuple(map(make_expectation, self.tracks))


def apply_replay(cassette: Cassette, replay: Replay) -> Cassette:
    """Return the cassette with the replay in place of the recording."""
    return cassette.model_copy(update={"tracks": replay.tracks, "order": replay.order})


class Replayer:
    """Plays cassettes. Keeps the scorers' processes until it is closed.

    Args:
        tokenizer_of: loads the tokenizer with a digest.
    """

    def __init__(self, tokenizer_of: TokenizerOf) -> None:
        self.tokenizer_of = tokenizer_of
        self._scorers: dict[bytes, Scorer] = {}

    def __enter__(self) -> Replayer:
        return self

    def __exit__(self, *_: object) -> None:
        for scorer in self._scorers.values():
            scorer.close()
        self._scorers.clear()

    def harness(self, cassettes: Sequence[Cassette]) -> list[Replay]:
        """Play cassettes with the model's turns from the tape. Returns one replay each, in order."""
        return _play_batches(
            cassettes, lambda batch: self._play(batch, NoEngine(batch[0].sampling.positions))
        )

    def exact(self, cassettes: Sequence[Cassette], engine: SamplingBackend) -> list[Replay]:
        """Play cassettes with a live model: the same weights and keys give the same tokens."""
        return _play_batches(cassettes, lambda batch: self._play(batch, engine, until=0))

    def fork(self, cassette: Cassette, turn: int, samples: int, engine: SamplingBackend) -> list[Replay]:
        """Play the first `turn` actions from the tape, and sample the remaining actions `samples` times.

        Replay i uses the random numbers of sample i of the cassette's task.

        Raises:
            RequestError: when the tape has fewer actions.
        """
        if turn >= len(cassette.order):
            raise RequestError(
                f"the episode has {len(cassette.order)} turns, and a fork after turn {turn} samples none",
                where=cassette.source.episode_id,
                remedy=f"fork after turn 0 to {len(cassette.order) - 1}",
            )
        return self._play([_with_sample(cassette, sample) for sample in range(samples)], engine, until=turn)

    def rescore(self, cassettes: Sequence[Cassette]) -> list[Replay]:
        """Score recorded episodes again, without playing them; keep failed and empty episodes as they are."""

        def score(batch: Sequence[Cassette]) -> list[Replay]:
            valid = [tape for tape in batch if tape.order and not any(t.verdict.failure for t in tape.tracks)]
            items = [
                (tape.task.task(), _make_transcript(tape, track.player))
                for tape in valid
                for track in tape.tracks
                if not track.agent
            ]
            outcomes = iter(self._scorer(batch[0]).score(items))
            verdicts = {
                tape.digest: [
                    track if track.agent else _with_outcome(track, next(outcomes)) for track in tape.tracks
                ]
                for tape in valid
            }
            return [Replay(tuple(verdicts.get(tape.digest, tape.tracks)), tape.order) for tape in batch]

        return _play_batches(cassettes, score)

    def _scorer(self, cassette: Cassette) -> Scorer:
        section = canonical_json(cassette.environment)
        if section not in self._scorers:
            self._scorers[section] = Scorer(cassette.environment)
        return self._scorers[section]

    def _play(
        self, cassettes: Sequence[Cassette], engine: SamplingBackend, until: int | None = None
    ) -> list[Replay]:
        """Play cassettes that share settings; see `TapedWorker.until`."""
        first, sampling = cassettes[0], cassettes[0].sampling
        environment = make_environment(first.environment, checked=False)
        tokenizer, scorer = self.tokenizer_of(first.tokenizer), self._scorer(first)
        for tape in cassettes:
            _check_tokens(tape, tokenizer)
        worker = TapedWorker(engine, tokenizer, scorer, environment, sampling.key[0], until=until)
        params = SamplingParams(
            sampling.max_tokens,
            sampling.temperature,
            sampling.stop_token_ids,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
        )
        sessions = Sessions(worker.scorer.processes, environment)
        opened = sessions.open([(tape.task.task(), session_seed(tape.sampling.key)) for tape in cassettes])
        for tape, session in zip(cassettes, opened, strict=True):
            rollout = worker.new_rollout(tape.sampling.key, tape.sampling.sample, session)
            rollout.advance()
            worker.tapes[rollout] = tape
        samples = 1 + max(tape.sampling.sample for tape in cassettes)
        worker.play_to_end(sessions, [*worker.tapes], params, samples=samples, watch=Stopwatch())
        return [_collect_replay(worker, rollout, params) for rollout in worker.tapes]


def split_batches(cassettes: Iterable[Cassette]) -> Iterator[list[Cassette]]:
    """Yield batches of the same run, environment and sampling settings, which can be played together."""

    def kind(one: Cassette) -> bytes:
        shared = one.sampling.model_dump(exclude={"key", "sample"})
        return canonical_json([one.source.run, one.source.file, one.environment, one.tokenizer, shared])

    for _, group in groupby(sorted(cassettes, key=kind), key=kind):
        members = list(group)
        for start in range(0, len(members), MAX_BATCH_SIZE):
            yield members[start : start + MAX_BATCH_SIZE]


def _play_batches(
    cassettes: Sequence[Cassette], play: Callable[[Sequence[Cassette]], list[Replay]]
) -> list[Replay]:
    replays: dict[str, Replay] = {}
    for batch in split_batches({cassette.digest: cassette for cassette in cassettes}.values()):
        replays |= zip([cassette.digest for cassette in batch], _play_or_report(batch, play), strict=True)
    return [replays[cassette.digest] for cassette in cassettes]


def _play_or_report(
    batch: Sequence[Cassette], play: Callable[[Sequence[Cassette]], list[Replay]]
) -> list[Replay]:
    """Play a batch. If that fails, play its cassettes one by one, and record the error of each."""
    try:
        return play(batch)
    except Exception as error:  # any error of the harness is a finding, and must not hide other cassettes
        if len(batch) > 1:
            return [replay for cassette in batch for replay in _play_or_report([cassette], play)]
        reason = error.what if isinstance(error, PeriluneError) else f"{type(error).__name__}: {error}"
        return [Replay(error=reason)]


def _with_sample(cassette: Cassette, sample: int) -> Cassette:
    return cassette.model_copy(update={"sampling": cassette.sampling.model_copy(update={"sample": sample})})


def _collect_replay(worker: TapedWorker, rollout: Rollout, params: SamplingParams) -> Replay:
    stops = [make(params, rollout.task).stop for make in (worker.add_stop_texts, worker.agent_params)]
    tape, is_taped = worker.tapes[rollout], worker.until is None
    tracks: list[Track] = []
    for group in worker.build_groups([rollout], params):
        for episode in group:
            found = extract_tracks(_drop_missing_turns(episode), tape.sampling, *stops)
            tracks += [_restore_finished(tape, track) for track in found] if is_taped else found
    taken = worker.order.get(rollout, {})
    order = tuple(
        taken.get(number, "") for number in range(max([len(rollout.actions), *(n + 1 for n in taken)]))
    )
    is_aborted = any(track.verdict.finish_reason == "aborted" for track in tracks)
    if not is_aborted and len(taken) != sum(len(track.turns) for track in tracks):
        return Replay(error="two turns without an observation between them cannot be told apart")
    return Replay(tuple(tracks), order)


def _drop_missing_turns(episode: Episode) -> Episode:
    """Return the episode without the turns that the tape lacked, which have no tokens."""
    spans = tuple(
        replace(span, messages=span.messages[:-1]) if span.finish_reason == "aborted" else span
        for span in episode.spans
    )
    messages = episode.messages[:-1] if episode.finish_reason == "aborted" else episode.messages
    return replace(episode, messages=messages, spans=spans)


def _check_tokens(cassette: Cassette, tokenizer: Tokenizer) -> None:
    """Check the recorded tokens.

    Raises:
        RequestError: when the vocabulary lacks one.
    """
    for track in cassette.tracks:
        for number, turn in enumerate(track.turns, 1):
            if any(not 0 <= token < tokenizer.vocab_size for token in turn.tokens):
                what = f"agent {track.span_id}, turn {number}: a token is outside the vocabulary"
                raise RequestError(what, where=cassette.source.episode_id, remedy="record the episode again")


def _restore_finished(cassette: Cassette, track: Track) -> Track:
    """Return the track with `finished` of each turn as on the tape: shrunk turns are below the limit."""
    tape = cassette.track(track.span_id)
    finished = [turn.finished for turn in tape.turns[: len(track.turns)]] if tape else []
    turns = [
        turn.model_copy(update={"finished": flag}) for turn, flag in zip(track.turns, finished, strict=False)
    ]
    return track.model_copy(update={"turns": tuple(turns)})


def _make_transcript(cassette: Cassette, player: int) -> Transcript:
    *earlier, last = cassette.actions()
    return Transcript(
        last.text,
        last.finished,
        tuple(turn.text for turn in earlier),
        session_seed(cassette.sampling.key),
        player,
        cut_off=tuple(index for index, turn in enumerate(earlier) if not turn.finished),
    )


def _with_outcome(track: Track, outcome: Outcome) -> Track:
    """Return the track with another score. Terms that a cut-off episode did not have are left out."""
    if isinstance(outcome, Failure):
        failure = f"{outcome.boundary}: {outcome.reason}"
        failed: dict[str, Any] = {"reward": None, "terms": {}, "failure": failure}
        return track.model_copy(update={"verdict": track.verdict.model_copy(update=failed)})
    is_cut = track.verdict.finish_reason == "length"
    terms = {name: term for name, term in outcome.terms.items() if name in track.verdict.terms or not is_cut}
    scored = track.verdict.model_copy(update={"reward": outcome.reward, "terms": terms})
    return track.model_copy(update={"verdict": scored})
