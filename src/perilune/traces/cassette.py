"""A cassette: one recorded episode with everything that is needed to play it again.

The digest of its canonical JSON names a cassette, so it never changes. Secrets in texts are redacted by the
rules of the bundle (`perilune.redaction`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from perilune.data.episode import Episode
from perilune.data.spans import Span, make_span_id
from perilune.environments.core.protocol import Task
from perilune.errors import RequestError
from perilune.files import canonical_json, sha256_bytes
from perilune.frozen import Frozen
from perilune.redaction import redact_document

SCHEMA_VERSION = 2

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
    """The part of one player or sub-agent in an episode.

    Attributes:
        agent: id of a sub-agent, such as "2.0"; "" for the player. Later contexts of the player are
            sub-agents, too. A sub-agent's verdict has no reward, only a finish reason.
        opening, prompt: the messages before the player's first turn, and their tokens.
        stop: texts that end a turn.
    """

    player: Annotated[int, Field(ge=0)]
    agent: Annotated[str, Field(pattern=r"^([0-9]{1,9}(\.[0-9]{1,9})*)?$")] = ""
    opening: Messages
    prompt: tuple[int, ...]
    turns: tuple[Turn, ...]
    verdict: Verdict
    stop: tuple[str, ...] = ()

    @property
    def span_id(self) -> str:
        """The id of the agent's span, as of `make_span_id`."""
        return make_span_id(self.player, self.agent)


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
    """One episode of all its players and their sub-agents.

    Attributes:
        tokenizer: digest of the tokenizer's files, which the suite holds.
        checkpoint: digest of the weights that sampled every turn; None if no stored checkpoint holds them.
        order: `Track.span_id` of each action's agent, in order; "" for the empty action of a sub-agent that
            had no room for a turn.
        tracks: by player and sub-agent.
        shrunk_from: digest of the original if this cassette was cut, so that no model sampled its turns.
    """

    schema_version: Literal[2] = 2
    source: Source
    environment: dict[str, Any]
    tokenizer: str
    checkpoint: str | None
    task: TaskRecord
    sampling: Sampling
    order: tuple[str, ...]
    tracks: tuple[Track, ...]
    shrunk_from: str | None = None

    @model_validator(mode="after")
    def _check_agents(self) -> Cassette:
        turns = {track.span_id: len(track.turns) for track in self.tracks}
        if len(turns) < len(self.tracks):
            raise ValueError("two tracks have the same player and agent")
        for track in self.tracks:
            parent = track.span_id.rpartition(".")[0]
            if "." in parent and parent not in turns:
                raise ValueError(f"the sub-agent {track.span_id} has the parent {parent}, which has no track")
        aborted = {track.span_id for track in self.tracks if track.verdict.finish_reason == "aborted"}
        for agent, count in Counter(filter(None, self.order)).items():
            if agent not in turns:
                raise ValueError(f"order: the agent {agent[:80]!r} has no track")
            if count > turns[agent] + (agent in aborted):
                raise ValueError(f"order: the agent {agent} has {count} actions and {turns[agent]} turns")
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        return sha256_bytes(self.to_bytes())

    @property
    def tokens(self) -> int:
        """Number of tokens of prompts, turns and observations of all players and sub-agents."""
        return sum(
            len(track.prompt) + sum(len(turn.tokens) + len(turn.seen) for turn in track.turns)
            for track in self.tracks
        )

    def track(self, span_id: str) -> Track | None:
        """Return the part of a player or sub-agent; None if it never moved."""
        return next((track for track in self.tracks if track.span_id == span_id), None)

    def actions(self) -> list[Turn]:
        """Return all actions in order."""
        turns = {track.span_id: iter(track.turns) for track in self.tracks}
        return [
            next(turns[agent]) if agent else Turn(tokens=(), text="", finished=True) for agent in self.order
        ]

    def to_bytes(self) -> bytes:
        """Return the canonical JSON, redacted."""
        return canonical_json(redact_document(self.model_dump(mode="json")))


def extract_tracks(
    episode: Episode, sampling: Sampling, stop: Sequence[str] = (), agent_stop: Sequence[str] = ()
) -> list[Track]:
    """Return the parts of a player and its sub-agents from the player's episode, in the order of their ids.

    Args:
        agent_stop: texts that end a turn of a sub-agent.

    Raises:
        RequestError: as `extract_track`, and when the file has no tokens of the sub-agents.
    """
    tracks = [extract_track(episode, sampling, stop)]
    for span in sorted(episode.spans[1:], key=lambda span: [*map(int, span.span_id.split("."))]):
        agent = span.span_id.partition(".")[2]
        tracks.append(extract_track(_agent_episode(episode, span), sampling, agent_stop, agent))
    return tracks


def _agent_episode(episode: Episode, span: Span) -> Episode:
    """Return the part of a sub-agent as an episode without a score.

    Raises:
        RequestError: when the span has no tokens.
    """
    if len(span.token_ids) != span.tokens + span.prompt_tokens:
        what = "the episodes have no tokens of sub-agents: an earlier version of Perilune wrote them"
        raise RequestError(what, where=episode.episode_id, remedy="run the stage again")
    mask = np.array(span.loss_mask, np.bool_)
    first = int(np.argmax(mask)) if mask.any() else len(mask)
    ids, mask = np.array(span.token_ids, np.int32), mask[first:]
    return replace(
        episode,
        messages=span.messages,
        prompt_ids=ids[:first],
        token_ids=ids[first:],
        loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        policy_version=np.where(mask, span.policy_version, -1).astype(np.int32),
        finish_reason=span.finish_reason or "stop",
        reward=None,
        reward_terms={},
        step_rewards=None,
        failure="",
        metrics={},
        routed_experts=None,
        spans=(),
        top_ids=None,
        top_logprobs=None,
        reference_logprobs=None,
    )


def extract_track(episode: Episode, sampling: Sampling, stop: Sequence[str] = (), agent: str = "") -> Track:
    """Return the part of a player from its episode, or that of a sub-agent.

    A turn is finished if it has a stop token or a text of `stop`. A player's is also finished if it has fewer
    than `sampling.max_tokens` tokens; turns of sub-agents may have lower limits.

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
        finished = tokens[-1] in sampling.stop_token_ids
        finished = finished or (not agent and len(tokens) < sampling.max_tokens)
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
        agent=agent,
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
