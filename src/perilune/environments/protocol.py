"""Where episodes happen: the one protocol every environment speaks.

An environment hands out tasks, opens a session on one of them, takes the policy's actions as text, and
scores a finished transcript. Scoring is pure: the same task and transcript give the same outcome, here or
in another process.
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
        prompt: the opening messages, as the policy sees them.
        data: JSON-able facts that scoring needs (question, answer, metadata).
        difficulty: a number that grows with difficulty, or None when unknown.
    """

    task_id: str
    prompt: tuple[Message, ...]
    data: Mapping[str, Any]
    difficulty: float | None = None


@dataclass(frozen=True, slots=True)
class Transcript:
    """What the policy wrote for a task.

    `text` is the final answer's text without special tokens; `finished` is False when the token limit
    cut it off before an end-of-sequence token.
    """

    text: str
    finished: bool = True
    messages: tuple[Message, ...] = ()


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


@dataclass(frozen=True, slots=True)
class Step:
    """What one action led to."""

    messages: tuple[Message, ...]
    reward_terms: Mapping[str, float]
    done: bool
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class Session(Protocol):
    """One episode under way."""

    messages: tuple[Message, ...]
    current_player: int

    def step(self, action: str) -> Step:
        """Take the policy's action; what comes back has been appended to `messages`."""
        ...


class Environment(Protocol):
    """A family of tasks."""

    id: str

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Distinct tasks of a split in an order fixed by `seed`; may never end."""
        ...

    def reset(self, task: Task, seed: int) -> Session:
        """Open a session on `task`."""
        ...

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        """Judge a transcript. Pure; may be slow or hostile, so callers use `perilune.verifiers`."""
        ...
