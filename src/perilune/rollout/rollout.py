"""Episodes under way: what each player saw and said, token by token, and how it came to an end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perilune.data.episode import FinishReason
from perilune.engine.request import Completion
from perilune.environments.core.episode_totals import EpisodeTotals
from perilune.environments.core.protocol import Failure, Message, Observation, Outcome, Task
from perilune.models.text.tokenizer import Tokenizer
from perilune.models.text.turns import continuation
from perilune.verifiers.sessions import RemoteSession


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One turn of the policy.

    Attributes:
        start: place of its first token among the seat's tokens after the prompt.
        asked: every token that the engine was given to continue.
    """

    start: int
    asked: list[int]
    completion: Completion


@dataclass(slots=True)
class Seat:
    """What one player saw and said. Tokens are only ever added at the end.

    Attributes:
        opening: the messages of the prompt.
        messages: all messages so far, as text.
        token_ids: after the prompt: those that were sampled, and those of what others said.
    """

    opening: tuple[Message, ...] = ()
    messages: list[Message] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def begin(self, messages: Sequence[Message], prompt_ids: list[int]) -> None:
        """Take in the prompt."""
        self.opening, self.messages, self.prompt_ids = tuple(messages), [*messages], prompt_ids

    def add_observation(self, tokenizer: Tokenizer, messages: Sequence[Message]) -> None:
        """Take in what was said since the last turn.

        Raises:
            RequestError: when the chat template refuses it, or the vocabulary lacks a character of it.
        """
        self.token_ids += continuation(tokenizer, self.opening, messages, self.token_ids[-1])
        self.messages += messages

    def context(self) -> list[int]:
        """All tokens so far."""
        return self.prompt_ids + self.token_ids

    def add_completion(self, asked: list[int], completion: Completion, text: str) -> None:
        """Add a turn of the policy."""
        self.turns.append(Turn(len(self.token_ids), asked, completion))
        self.token_ids += completion.token_ids.tolist()
        self.messages.append({"role": "assistant", "content": text})

    def sampled(self, name: str, elsewhere: float, dtype: type[np.generic]) -> NDArray[Any]:
        """[T] of that field of the turns' completions, and `elsewhere` on what others said."""
        found = np.full(len(self.token_ids), elsewhere, dtype)
        for turn in self.turns:
            part = getattr(turn.completion, name)
            found[turn.start : turn.start + len(part)] = part
        return found

    def mask(self) -> NDArray[np.bool_]:
        """bool[T], True on what the policy sampled."""
        found = np.zeros(len(self.token_ids), np.bool_)
        for turn in self.turns:
            found[turn.start : turn.start + len(turn.completion.token_ids)] = True
        return found


@dataclass(slots=True, eq=False)
class Rollout:
    """One episode of all players.

    Attributes:
        key: (seed, step, place of its task in the step).
        sample: which of the task's it is.
        others: seats that the policy does not have.
        finish_reason: "length" when a limit ended it.
        failure: what went wrong, in which case it has no score.
    """

    task: Task
    key: tuple[int, int, int]
    sample: int
    session: RemoteSession
    players: int
    seats: list[Seat] = field(init=False)
    tally: EpisodeTotals = field(init=False)
    others: frozenset[int] = frozenset()
    finish_reason: FinishReason = "stop"
    failure: Failure | None = None
    is_over: bool = False

    def __post_init__(self) -> None:
        self.seats = [Seat() for _ in range(self.players)]
        self.tally = EpisodeTotals(self.players)

    @property
    def seat(self) -> Seat:
        """Of the player to move."""
        assert isinstance(self.session.result, Observation)
        return self.seats[self.session.result.player]

    @property
    def is_others_turn(self) -> bool:
        """Whether the player to move is not the policy."""
        assert isinstance(self.session.result, Observation)
        return self.session.result.player in self.others

    @property
    def own(self) -> list[int]:
        """Seats that the policy has."""
        return [player for player in range(self.players) if player not in self.others]

    @property
    def news(self) -> tuple[Message, ...]:
        """What the player to move has not seen yet."""
        assert isinstance(self.session.result, Observation)
        return self.session.result.messages

    @property
    def actions(self) -> list[str]:
        """Of all players, in order."""
        return self.session.actions

    @property
    def is_single_turn(self) -> bool:
        """Whether the environment is of one turn."""
        return not self.session.is_held

    @property
    def turn_key(self) -> tuple[int, int, int]:
        """Of the random numbers of the next turn: no other turn of a run has it.

        After the first turn, whose samples are drawn together, the lanes of step and task (32 bits each) hold
        (turn, step) and (sample, task) with 10 and 12 bits for what comes first.
        """
        seed, step, index = self.key
        turn = len(self.actions)
        return seed, (turn % 1024) << 22 | step % (1 << 22), (self.sample % 4096) << 20 | index % (1 << 20)

    def add_completion(self, asked: list[int], completion: Completion, text: str) -> None:
        """Take the turn of the player to move."""
        self.seat.add_completion(asked, completion, text)
        self.finish_reason = completion.finish_reason
        if completion.finish_reason == "aborted":
            self.fail("model", "the turn was given up before it was finished")

    def fail(self, boundary: str, reason: str) -> None:
        """End it without a score."""
        self.failure, self.is_over = Failure(boundary, reason), True

    def cut(self) -> None:
        """End it where it stands, with what was earned so far."""
        self.finish_reason, self.is_over = "length", True

    def advance(self) -> None:
        """Count what the session's last step led to."""
        found = self.session.result
        if isinstance(found, Failure):
            self.fail(found.boundary, found.reason)
            return
        self.tally.add(found)
        if found.truncated:
            self.finish_reason = "length"
        self.is_over = found.done

    def outcome(self, player: int) -> Outcome:
        """What it was worth to a player."""
        return self.tally.score(player) if self.failure is None else self.failure
