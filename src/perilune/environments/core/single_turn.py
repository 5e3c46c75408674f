"""One question, one answer: the environments that are a prompt and a score."""

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
    """Base of an environment of one turn: write `tasks` and `score`, and there is nothing else to write."""

    id: str
    players = 1
    max_turns = 1
    confined = True

    @abstractmethod
    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Distinct tasks of a split in an order fixed by `seed`; may never end."""

    @abstractmethod
    def score(self, task: Task, transcript: Transcript) -> Outcome:
        """Judge the answer `transcript.text`."""

    def reset(self, task: Task, seed: int) -> OneAnswer:
        """Open a session: the prompt, one answer, done. `seed` changes nothing here."""
        return OneAnswer(self, task, seed)

    def close(self) -> None:  # noqa: B027  # most have nothing to close
        """There is nothing to let go of."""


class OneAnswer:
    """A session of one answer, which the environment's scorer judges."""

    def __init__(self, environment: SingleTurn, task: Task, seed: int) -> None:
        self._environment, self._task, self._seed = environment, task, seed
        self.observation = Observation()

    def step(self, action: str, finished: bool = True) -> Observation:
        """Take the answer.

        Raises:
            EpisodeFailedError: when the scorer could not judge it.
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
        """There is nothing to let go of."""
