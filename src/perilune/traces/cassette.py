"""A cassette: one recorded episode with everything that is needed to play it again.

The digest of its canonical JSON names a cassette, so it never changes. Secrets in texts are redacted by the
rules of the bundle (`perilune.redaction`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from perilune.data.episode import Episode
from perilune.environments.core.protocol import Task
from perilune.errors import RequestError
from perilune.files import canonical_json, sha256_bytes
from perilune.frozen import Frozen
from perilune.redaction import redact_document

SCHEMA_VERSION = 1

Messages = tuple[dict[str, str], ...]
Key = tuple[int, int, int]


class Turn(Frozen):
    """One turn of the policy, and the observation that follows.

    Attributes:
        tokens, text: the policy's output, and the text that the tokens decode to.
        finished: whether the policy ended the turn, not the limit on tokens.
        seen: tokens of the observation: between this turn and the player's next turn, or the end.
        messages: the observation as text.
    """

    tokens: tuple[int, ...]
    text: str
    finished: bool
    seen: tuple[int, ...] = ()
    messages: Messages = ()


class Verdict(Frozen):
    """The end of an episode for one player. `reward` is None, and `failure` set, if it has no score."""

    reward: float | None
    terms: dict[str, float]
    metrics: dict[str, float]
    finish_reason: Literal["stop", "length", "aborted"]
    failure: str


class Track(Frozen):
    """The part of one player in an episode.

    Attributes:
        opening, prompt: the messages before the player's first turn, and their tokens.
        stop: texts that end a turn.
    """

    player: int
    opening: Messages
    prompt: tuple[int, ...]
    turns: tuple[Turn, ...]
    verdict: Verdict
    stop: tuple[str, ...] = ()


class Sampling(Frozen):
    """The sampling settings of the turns, for `exact` and `fork`.

    Attributes:
        key: (seed, step, index of the task in the step), which seeds sampling and the session.
        sample: number of the episode among those of its key.
        positions: context window of the model in tokens; None if unknown.
    """

    key: Key
    sample: int
    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    positions: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


class Source(Frozen):
    """The origin of an episode: run, stage, file of episodes, id of the episode."""

    run: str
    stage: str
    file: str
    episode_id: str


class TaskRecord(Frozen):
    """The fields of a `Task`."""

    task_id: str
    prompt: Messages
    data: dict[str, Any]
    difficulty: float | None = None

    @classmethod
    def of(cls, task: Task) -> TaskRecord:
        prompt = tuple(dict(message) for message in task.prompt)
        return cls(task_id=task.task_id, prompt=prompt, data=dict(task.data), difficulty=task.difficulty)

    def task(self) -> Task:
        return Task(self.task_id, self.prompt, self.data, self.difficulty)


class Cassette(Frozen):
    """One episode of all its players.

    Attributes:
        tokenizer: digest of the tokenizer's files, which the suite holds.
        checkpoint: digest of the weights that sampled every turn; None if no stored checkpoint holds them.
        order: the player of each action, in order.
        shrunk_from: digest of the original if this cassette was cut, so that no model sampled its turns.
    """

    schema_version: Literal[1] = 1
    source: Source
    environment: dict[str, Any]
    tokenizer: str
    checkpoint: str | None
    task: TaskRecord
    sampling: Sampling
    order: tuple[int, ...]
    tracks: tuple[Track, ...]
    shrunk_from: str | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        return sha256_bytes(self.to_bytes())

    @property
    def tokens(self) -> int:
        """Number of tokens of prompts, turns and observations of all players."""
        return sum(
            len(track.prompt) + sum(len(turn.tokens) + len(turn.seen) for turn in track.turns)
            for track in self.tracks
        )

    def track(self, player: int) -> Track | None:
        """Return the part of a player; None if it never moved."""
        return next((track for track in self.tracks if track.player == player), None)

    def actions(self) -> list[Turn]:
        turns = {track.player: iter(track.turns) for track in self.tracks}
        return [next(turns[player]) for player in self.order]

    def to_bytes(self) -> bytes:
        """Return the canonical JSON, redacted."""
        return canonical_json(redact_document(self.model_dump(mode="json")))


def extract_track(episode: Episode, sampling: Sampling, stop: Sequence[str] = ()) -> Track:
    """Return the part of a player from its episode.

    A turn is finished if it has fewer than `sampling.max_tokens` tokens, a stop token or a text of `stop`.

    Raises:
        RequestError: when two turns have no observation between them, so their tokens cannot be told apart.
    """
    runs = [(start, end) for is_sampled, start, end in episode.runs() if is_sampled]
    answers = [index for index, message in enumerate(episode.messages) if message["role"] == "assistant"]
    if len(runs) > len(answers):
        what = "two turns have no observation between them, so they cannot be told apart"
        raise RequestError(what, where=episode.episode_id)
    first = answers[-len(runs)] if runs else len(episode.messages)
    starts = [start for start in answers if start >= first]
    ends = [*starts[1:], len(episode.messages)]
    turns = []
    for number, ((begin, end), start) in enumerate(zip(runs, starts, strict=True)):
        tokens = episode.token_ids[begin:end].tolist()
        text = episode.messages[start]["content"]
        until = runs[number + 1][0] if number + 1 < len(runs) else len(episode.token_ids)
        is_last = number + 1 == len(runs)
        finished = len(tokens) < sampling.max_tokens or tokens[-1] in sampling.stop_token_ids
        finished = finished or any(stop_text in text for stop_text in stop)
        turns.append(
            Turn(
                tokens=tokens,
                text=text,
                finished=finished or (is_last and episode.finish_reason == "stop"),
                seen=episode.token_ids[end:until].tolist(),
                messages=_messages(episode.messages[start + 1 : ends[number]]),
            )
        )
    return Track(
        player=episode.player,
        opening=_messages(episode.messages[:first]),
        prompt=episode.prompt_ids.tolist(),
        turns=tuple(turns),
        verdict=extract_verdict(episode),
        stop=tuple(stop),
    )


def extract_verdict(episode: Episode) -> Verdict:
    return Verdict(
        reward=episode.reward,
        terms=dict(sorted(episode.reward_terms.items())),
        metrics=dict(sorted(episode.metrics.items())),
        finish_reason=episode.finish_reason,
        failure=episode.failure,
    )


def environment_digest(section: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an environment section."""
    return sha256_bytes(canonical_json(section))


def _messages(messages: Sequence[Mapping[str, str]]) -> Messages:
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)
