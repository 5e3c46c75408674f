"""Multi-turn environments, written as one generator per episode.

class Guess(MultiTurn):
    id, max_turns = "guess", 4

    def play(self, task, rng):
        secret = str(rng.integer(10, "secret"))
        guess = yield ask()
        while guess != secret:
            guess = yield ask("higher" if guess < secret else "lower")
        yield end_episode(1.0)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from perilune.environments.core.episode_totals import EpisodeTotals
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import (
    AgentTurn,
    Environment,
    EpisodeFailedError,
    Failure,
    Message,
    Observation,
    Outcome,
    Split,
    Task,
    Transcript,
)

EpisodeGenerator = Generator[Observation, str, None]
"""One episode: yields observations, receives the asked player's actions, and ends with `end_episode`."""


class MultiTurn(ABC):
    """Base class of multi-turn environments. Implement `tasks` and `play`.

    Attributes:
        cut_off: the action that replaces one that the token limit cut off. By default such an action is not
            played: the episode ends with the rewards so far. Games set it to an illegal move, so that a
            losing player gains nothing by exceeding the limit.
    """

    id: str
    players = 1
    max_turns = 16
    confined = True
    cut_off: str | None = None

    @abstractmethod
    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Yield distinct tasks of a split, in an order that `seed` determines. May be infinite."""

    @abstractmethod
    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        """Play one episode. When the session is closed early, `finally` blocks run."""

    def reset(self, task: Task, seed: int) -> ScriptedSession:
        """Open a session and run `play` to its first observation."""
        return ScriptedSession(self.play(task, KeyedRandom(seed, task.task_id)), self.max_turns, self.cut_off)

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        """Replay the transcript's actions and sum the rewards."""
        return score_by_replay(self, task, transcript)

    def close(self) -> None:  # noqa: B027  # most have nothing to close
        """Release resources; by default there are none."""


def score_by_replay(environment: Environment, task: Task, transcript: Transcript) -> Outcome:
    """Return the total that a session with the actions of a transcript gives to its player."""
    session = environment.reset(task, transcript.seed)
    totals = EpisodeTotals(environment.players)
    try:
        for index, action in enumerate(transcript.actions):
            if session.observation.done:
                return Failure("verifier", f"the episode was done before action {index + 1}")
            totals.add(session.step(action, transcript.is_finished(index)))
    except EpisodeFailedError as error:
        return error.failure
    finally:
        session.close()
    return totals.score(transcript.player)


class ScriptedSession:
    """A session that runs a generator."""

    def __init__(self, play: EpisodeGenerator, max_turns: int, cut_off: str | None = None) -> None:
        if not isinstance(play, Generator):
            raise TypeError("play is not a generator: `yield ask(...)` where the policy moves")
        self._play, self._turns_left, self._cut_off = play, max_turns, cut_off
        self.observation = self._next(None)

    def step(self, action: str, finished: bool = True) -> Observation:
        """Send the action of the player whose turn it is, and return the next observation."""
        if self.observation.done:
            raise ValueError("the episode is done")
        turn = self.observation.due[0]
        self._turns_left -= not turn.agent
        played = action if finished or not turn.is_own else self._cut_off
        self.observation = Observation(done=True, truncated=True) if played is None else self._next(played)
        if self.observation.done:
            self.close()
        return self.observation

    def close(self) -> None:
        self._play.close()

    def _next(self, action: str | None) -> Observation:
        try:
            observation = next(self._play) if action is None else self._play.send(action)
        except StopIteration:
            raise RuntimeError("play returned without `yield end_episode(...)`") from None
        if not isinstance(observation, Observation):
            raise TypeError(f"play yielded {type(observation).__name__}, not an Observation")
        if self._turns_left or observation.done:
            return observation
        if observation.due[0].agent:
            return observation
        return replace(
            observation, messages=(), player=0, done=True, truncated=True, legal=None, info={}, turns=()
        )


def ask(
    content: str | None = None,
    *,
    player: int = 0,
    role: str = "user",
    results: Sequence[str] = (),
    **fields: Any,
) -> Observation:
    """Ask `player` for the next action, after the message `content`.

    Args:
        results: ids of the sub-agents whose results the turn receives.
        fields: others of Observation.
    """
    messages: tuple[Message, ...] = () if content is None else ({"role": role, "content": content},)
    if results:
        turn = AgentTurn("", messages, results=tuple(results))
        return Observation(player=player, turns=(turn,), **fields)
    return Observation(messages, player, **fields)


def end_episode(
    *rewards: float, terms: Mapping[str, float] | None = None, metrics: Mapping[str, float] | None = None
) -> Observation:
    """End the episode with one reward per player for the last action, player 0 first."""
    return Observation(rewards=rewards, terms=terms or {}, metrics=metrics or {}, done=True)


def strip_move(move: str) -> str:
    """Strip up to two characters of space. With more, the move is illegal, as it may waste tokens."""
    stripped = move.strip()
    return stripped if len(move) <= len(stripped) + 2 else move
