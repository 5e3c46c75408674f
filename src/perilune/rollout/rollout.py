"""Episodes in progress: the messages and tokens of each player, and how the episode ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perilune.data.episode import FinishReason
from perilune.data.routes import Routes, no_routes
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
        start: index of its first token among the player's tokens after the prompt.
        context: all tokens that the engine continued.
    """

    start: int
    context: list[int]
    completion: Completion


@dataclass(slots=True)
class Trajectory:
    """The messages and tokens of one player. Tokens are only ever appended.

    Attributes:
        opening: the messages of the prompt.
        messages: all messages so far, as text.
        token_ids: tokens after the prompt, both sampled and observed.
    """

    opening: tuple[Message, ...] = ()
    messages: list[Message] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def begin(self, messages: Sequence[Message], prompt_ids: list[int]) -> None:
        """Set the prompt."""
        self.opening, self.messages, self.prompt_ids = tuple(messages), [*messages], prompt_ids

    def add_observation(self, tokenizer: Tokenizer, messages: Sequence[Message]) -> None:
        """Append the messages since the last turn.

        Raises:
            RequestError: when the chat template refuses them, or the vocabulary lacks a character.
        """
        self.token_ids += continuation(tokenizer, self.opening, messages, self.token_ids[-1])
        self.messages += messages

    def context(self) -> list[int]:
        """All tokens so far, with the prompt."""
        return self.prompt_ids + self.token_ids

    def add_completion(self, context: list[int], completion: Completion, text: str) -> None:
        """Append a turn of the policy."""
        self.turns.append(Turn(len(self.token_ids), context, completion))
        self.token_ids += completion.token_ids.tolist()
        self.messages.append({"role": "assistant", "content": text})

    def sampled(self, name: str, fill: float, dtype: type[np.generic]) -> NDArray[Any]:
        """[T] values of a field of the turns' completions; `fill` on observed tokens."""
        values = np.full(len(self.token_ids), fill, dtype)
        for turn in self.turns:
            part = getattr(turn.completion, name)
            values[turn.start : turn.start + len(part)] = part
        return values

    def routes(self) -> Routes | None:
        """Routes of all tokens but the last; None if the engine recorded none.

        A turn has routes of its whole context. Those of earlier turns are kept, because they computed what
        was sampled there. Rows are missing where weights changed within a turn, which computed the context
        again: other experts may have computed the tokens before.
        """
        recorded = [one for turn in self.turns if (one := turn.completion.routed_experts) is not None]
        if not recorded:
            return None
        routes = no_routes(len(self.prompt_ids) + len(self.token_ids) - 1, recorded[0])
        known = 0
        for turn in self.turns:
            part, versions = turn.completion.routed_experts, turn.completion.policy_version
            end = len(turn.context) + len(versions) - 1
            if part is not None and len(part) == end:
                routes[known:end] = part[known:]
                older = np.flatnonzero(versions != versions[-1])
                routes[len(turn.context) - 1 + older] = no_routes(1, part)
            known = end
        return routes

    def mask(self) -> NDArray[np.bool_]:
        """bool[T], True on tokens that the policy sampled."""
        sampled = np.zeros(len(self.token_ids), np.bool_)
        for turn in self.turns:
            sampled[turn.start : turn.start + len(turn.completion.token_ids)] = True
        return sampled


@dataclass(slots=True, eq=False)
class Rollout:
    """One episode of all players.

    Attributes:
        key: (seed, step, index of the task in the step).
        sample: number of the episode among those of its task.
        opponents: players whose turns the opponents' engine samples.
        finish_reason: "length" when a limit ended the episode.
        failure: the error that ended the episode; it then has no score.
    """

    task: Task
    key: tuple[int, int, int]
    sample: int
    session: RemoteSession
    players: int
    trajectories: list[Trajectory] = field(init=False)
    totals: EpisodeTotals = field(init=False)
    opponents: frozenset[int] = frozenset()
    finish_reason: FinishReason = "stop"
    failure: Failure | None = None
    is_over: bool = False

    def __post_init__(self) -> None:
        self.trajectories = [Trajectory() for _ in range(self.players)]
        self.totals = EpisodeTotals(self.players)

    @property
    def observation(self) -> Observation:
        """The observation of the player to move."""
        assert isinstance(self.session.result, Observation)
        return self.session.result

    @property
    def trajectory(self) -> Trajectory:
        """The trajectory of the player to move."""
        return self.trajectories[self.observation.player]

    @property
    def is_opponents_turn(self) -> bool:
        """Whether an opponent is to move."""
        return self.observation.player in self.opponents

    @property
    def own_players(self) -> list[int]:
        """The players whose turns the policy samples."""
        return [player for player in range(self.players) if player not in self.opponents]

    @property
    def new_messages(self) -> tuple[Message, ...]:
        """Messages that the player to move has not observed yet."""
        return self.observation.messages

    @property
    def actions(self) -> list[str]:
        """The actions of all players, in order."""
        return self.session.actions

    @property
    def is_single_turn(self) -> bool:
        """Whether the environment has a single turn."""
        return not self.session.is_held

    @property
    def turn_key(self) -> tuple[int, int, int]:
        """Key of the next turn's random numbers, see `turn_key`."""
        return turn_key(self.key, self.sample, len(self.actions))

    def add_completion(self, context: list[int], completion: Completion, text: str) -> None:
        """Append a turn of the player to move."""
        self.trajectory.add_completion(context, completion, text)
        self.finish_reason = completion.finish_reason
        if completion.finish_reason == "aborted":
            self.fail("model", "sampling of the turn was aborted")

    def fail(self, boundary: str, reason: str) -> None:
        """End the episode without a score."""
        self.failure, self.is_over = Failure(boundary, reason), True

    def truncate(self) -> None:
        """End the episode with the score so far."""
        self.finish_reason, self.is_over = "length", True

    def advance(self) -> None:
        """Record the result of the session's last step."""
        result = self.session.result
        if isinstance(result, Failure):
            self.fail(result.boundary, result.reason)
            return
        self.totals.add(result)
        if result.truncated:
            self.finish_reason = "length"
        self.is_over = result.done

    def outcome(self, player: int) -> Outcome:
        """The player's score, or the failure."""
        return self.totals.score(player) if self.failure is None else self.failure


def turn_key(key: tuple[int, int, int], sample: int, turn: int) -> tuple[int, int, int]:
    """Key of the random numbers of a later turn; no other turn of a run has the same key.

    The first turns of a group are sampled together under `key`. In later turns the lanes of step and task (32
    bits each) hold (turn, step) and (sample, task), with 10 bits for the turn and 12 for the sample.

    Args:
        turn: number of actions of all players before it, at least 1.
    """
    seed, step, index = key
    return seed, (turn % 1024) << 22 | step % (1 << 22), (sample % 4096) << 20 | index % (1 << 20)
