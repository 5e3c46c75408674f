"""Several turns, one function: an episode is written from top to bottom, and yields wherever it is answered.

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
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from perilune.environments.core.episode_totals import EpisodeTotals
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import (
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
"""An episode: yields what the player to move sees, is sent that player's action, ends with `end_episode`."""


class MultiTurn(ABC):
    """Base of an environment of several turns: write `tasks` and `play`.

    A move that was cut off by the token limit is not played: it ends the episode with what was
    earned so far, or is taken for `cut_off` where the class says so. A game needs that, in which who is about
    to lose would otherwise not end its move.
    """

    id: str
    players = 1
    max_turns = 16
    confined = True
    cut_off: str | None = None

    @abstractmethod
    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Distinct tasks of a split in an order fixed by `seed`; may never end."""

    @abstractmethod
    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        """One episode. A `finally` in it runs when the session is closed, however it ends."""

    def reset(self, task: Task, seed: int) -> ScriptedSession:
        """Open a session: `play` up to its first observation."""
        return ScriptedSession(self.play(task, KeyedRandom(seed, task.task_id)), self.max_turns, self.cut_off)

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        """Play the transcript's actions again, and add up what they earned."""
        session = self.reset(task, transcript.seed)
        tally = EpisodeTotals(self.players)
        try:
            for place, action in enumerate(transcript.actions):
                if session.observation.done:
                    return Failure("verifier", f"the episode was done before action {place + 1}")
                is_last = place == len(transcript.earlier)
                tally.add(session.step(action, transcript.finished or not is_last))
        except EpisodeFailedError as error:
            return error.failure
        finally:
            session.close()
        return tally.score(transcript.player)

    def close(self) -> None:  # noqa: B027  # most have nothing to close
        """There is nothing to let go of."""


class ScriptedSession:
    """A session that a generator plays."""

    def __init__(self, play: EpisodeGenerator, max_turns: int, cut_off: str | None = None) -> None:
        self._play, self._left, self._cut_off = play, max_turns, cut_off
        self.observation = next(play)

    def step(self, action: str, finished: bool = True) -> Observation:
        """Send the action of the player to move."""
        if self.observation.done:
            raise ValueError("the episode is done")
        self._left -= 1
        played = action if finished else self._cut_off
        self.observation = Observation(done=True, truncated=True) if played is None else self._next(played)
        if self.observation.done:
            self.close()
        return self.observation

    def close(self) -> None:
        """End the generator where it stands."""
        self._play.close()

    def _next(self, action: str) -> Observation:
        try:
            found = self._play.send(action)
        except StopIteration:
            raise RuntimeError("play ended without a last observation that is done") from None
        if not isinstance(found, Observation):
            raise TypeError(f"play yielded {type(found).__name__}, no observation")
        if self._left or found.done:
            return found
        return Observation(
            rewards=found.rewards, terms=found.terms, metrics=found.metrics, done=True, truncated=True
        )


def ask(content: str | None = None, *, player: int = 0, role: str = "user", **more: Any) -> Observation:
    """Let `player` move next, after a message if there is one; `more` are further fields."""
    messages: tuple[Message, ...] = () if content is None else ({"role": role, "content": content},)
    return Observation(messages, player, **more)


def end_episode(
    *rewards: float, terms: Mapping[str, float] | None = None, metrics: Mapping[str, float] | None = None
) -> Observation:
    """The end: what each player gets for the last move, the one of player 0 first."""
    return Observation(rewards=rewards, terms=terms or {}, metrics=metrics or {}, done=True)
