"""Single-turn environments: a prompt and a score."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from perilune.environments.core.protocol import (
    EpisodeFailedError,
    Failure,
    Observation,
    Outcome,
    Split,
    Task,
    Transcript,
)


class SingleTurn(ABC):
    """Base class of single-turn environments. Implement `tasks` and `score`."""

    id: str
    players = 1
    max_turns = 1
    confined = True

    @abstractmethod
    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Yield distinct tasks of a split, in an order that `seed` determines. May be infinite."""

    @abstractmethod
    def score(self, task: Task, transcript: Transcript) -> Outcome:
        """Score the answer `transcript.text`."""

    def reset(self, task: Task, seed: int) -> SingleTurnSession:
        """Open a session that takes one answer. The seed has no effect."""
        return SingleTurnSession(self, task, seed)

    def close(self) -> None:  # noqa: B027  # most have nothing to close
        """Release resources; by default there are none."""


class SingleTurnSession:
    """A session that takes one answer and scores it."""

    def __init__(self, environment: SingleTurn, task: Task, seed: int) -> None:
        self._environment, self._task, self._seed = environment, task, seed
        self.observation = Observation()

    def step(self, action: str, finished: bool = True) -> Observation:
        """Score the answer.

        Raises:
            EpisodeFailedError: if the answer could not be scored.
        """
        if self.observation.done:
            raise ValueError("the episode is done")
        outcome = self._environment.score(self._task, Transcript(action, finished, seed=self._seed))
        if isinstance(outcome, Failure):
            raise EpisodeFailedError(outcome.boundary, outcome.reason)
        self.observation = Observation(
            rewards=(outcome.reward,), terms=outcome.terms, metrics=outcome.metrics, done=True
        )
        return self.observation

    def close(self) -> None:
        """Do nothing: the session holds no resources."""
