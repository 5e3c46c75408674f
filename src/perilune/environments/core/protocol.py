"""Where episodes happen: the one protocol every environment speaks.

An environment hands out tasks and opens sessions on them. A session says what the player to move sees, takes
that player's action as text, and says what it led to, until it is done. What a finished episode was worth can
be judged again from its transcript: the same task and transcript give the same outcome, here or in another
process, because whatever chance does follows from the task and the session's seed.

Most environments derive from `SingleTurn` (a prompt and a score) or `MultiTurn` (one function that plays).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant" | "tool", "content": text}
Split = Literal["train", "heldout"]


@dataclass(frozen=True, slots=True)
class Task:
    """One problem instance.

    Attributes:
        task_id: stable digest of what is asked; it alone decides the split, so no task is in both.
        prompt: the opening messages, which every player sees before its first observation.
        data: JSON-able facts that playing and scoring need (question, answer, metadata).
        difficulty: a number that grows with difficulty, or None when unknown.
    """

    task_id: str
    prompt: tuple[Message, ...]
    data: Mapping[str, Any]
    difficulty: float | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """What the player to move sees that is new, and what the move before it led to.

    Attributes:
        messages: what the player to move has not seen yet and did not write: roles "user", "tool" and
            "system". A player's prompt is the task's prompt and its first observation. Empty when done.
        player: who moves next, from 0. Players who move at the same time move one after another, and see of
            each other's moves only when all have moved.
        rewards: what the last move earned, by player; empty is nothing for anybody.
        terms: its named parts, which add up over the episode; for the reader, and for nobody to optimise.
        metrics: further figures of the episode, of which the last of a name counts.
        done: nobody moves any more.
        truncated: done because of a limit, not by the rules.
        legal: every action that the player may take, where they can be listed; None where they cannot.
        info: JSON-able facts for logs.
    """

    messages: tuple[Message, ...] = ()
    player: int = 0
    rewards: tuple[float, ...] = ()
    terms: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    done: bool = False
    truncated: bool = False
    legal: tuple[str, ...] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was done in an episode: enough to play it again.

    Attributes:
        text: the last action, without special tokens; where there is one turn, the answer.
        finished: False when the token limit cut the last action off before an end-of-sequence token.
        earlier: all actions before it in order, whoever took them.
        seed: of the session.
        player: whose worth is asked for.
        messages: the conversation as that player saw it, from its prompt on, where somebody kept it.
    """

    text: str
    finished: bool = True
    earlier: tuple[str, ...] = ()
    seed: int = 0
    player: int = 0
    messages: tuple[Message, ...] = ()

    @property
    def actions(self) -> tuple[str, ...]:
        """All actions in order."""
        return (*self.earlier, self.text)


@dataclass(frozen=True, slots=True)
class Score:
    """What a transcript is worth: `reward`, its named terms, and figures for the reader.

    `metrics` may carry "strategy/NAME": 1.0 when the environment recognises how the task was attacked.
    """

    reward: float
    terms: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """No score could be given. Data, not a crash: the episode leaves its group and is counted.

    `boundary` names who failed: "environment", "verifier", "model" or "sandbox".
    """

    boundary: str
    reason: str


Outcome = Score | Failure


class EpisodeFailedError(Exception):
    """Raised by a session to say which boundary failed; with any other exception the environment did."""

    def __init__(self, boundary: str, reason: str) -> None:
        super().__init__(f"{boundary}: {reason}")
        self.failure = Failure(boundary, reason)


class Session(Protocol):
    """One episode under way.

    Attributes:
        observation: the last one: what the player to move sees.
    """

    observation: Observation

    def step(self, action: str, finished: bool = True) -> Observation:
        """Take the action of the player to move.

        Args:
            finished: False when the action was cut off by a limit; the episode is then done.
        """
        ...

    def close(self) -> None:
        """Let go of what the session holds; may be called again, and before the episode is done."""
        ...


class Environment(Protocol):
    """A family of tasks.

    Attributes:
        id: names it in episodes, e.g. "reasoning_gym/chain_sum".
        players: how many there are.
        max_turns: the most actions of all players together until an episode is done.
        confined: whether its sessions only compute. Where it is False their process may start others, write
            files and use the network; the environment then has to contain what it runs.
    """

    id: str
    players: int
    max_turns: int
    confined: bool

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Distinct tasks of a split in an order fixed by `seed`; may never end."""
        ...

    def reset(self, task: Task, seed: int) -> Session:
        """Open a session on `task`; `seed` fixes whatever chance does in it."""
        ...

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        """Judge a transcript: what a session with these actions gave `transcript.player`.

        Pure; may be slow or hostile, so callers use `perilune.verifiers`.
        """
        ...

    def close(self) -> None:
        """Let go of what all sessions share; may be called again."""
        ...
