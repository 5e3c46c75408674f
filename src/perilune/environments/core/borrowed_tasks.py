"""The tasks of another environment, which also scores the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

from perilune.environments.core import registry
from perilune.environments.core.protocol import EpisodeFailedError, Failure, Score, Split, Task, Transcript
from perilune.environments.core.reference_answer import expected_answer
from perilune.errors import RequestError

if TYPE_CHECKING:
    from perilune.verifiers.scorer import Scorer


class BorrowedTasks:
    """The environment of the field `tasks`. It scores in a separate process.

    Args:
        section: of that environment, with the rewards and the prompting of the one that borrows.

    Raises:
        RequestError: when the environment has several turns or players.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        self._section = section
        self._lock = Lock()  # sessions play in several threads
        self.environment = registry.make_environment(section, checked=False)
        if getattr(self.environment, "max_turns", 1) > 1 or getattr(self.environment, "players", 1) > 1:
            what = f"{self.environment.id} has several turns; `tasks` needs an environment with one answer"
            raise RequestError(what, where="environment.tasks.id")

    def check_files(self) -> None:
        if hasattr(self.environment, "check_files"):
            self.environment.check_files()

    def characters(self) -> dict[str, str]:
        characters: dict[str, str] = getattr(self.environment, "characters", dict)()
        return characters

    def bare_source_tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Return the environment's tasks, without prompts if it supports this (`LongContexts`)."""
        has_bare_tasks = hasattr(type(self.environment), "bare_tasks")  # a wrapper chooses tasks itself
        draw: Callable[[Split, int], Iterator[Task]] = (
            self.environment.bare_tasks if has_bare_tasks else self.environment.tasks  # type: ignore[attr-defined]
        )
        return draw(split, seed)

    @staticmethod
    def source_task(task: Task) -> Task:
        """Return the environment's task in the data of a task that borrows it, without its prompt."""
        return Task(task.task_id, (), task.data["task"], task.difficulty)

    def expected_answer(self, task: Task) -> str:
        """Return the right answer of a task that borrows one; "" if the environment states none."""
        return expected_answer(self.environment, self.source_task(task))

    def score_reply(self, task: Task, answer: str) -> Score:
        """Score a bare answer, in the form of the environment's method `reply` if it has one.

        Raises:
            EpisodeFailedError: when it cannot be scored.
        """
        reply = getattr(self.environment, "reply", lambda task, answer: answer)
        return self.score(task, reply(task, answer))

    def score(self, task: Task, answer: str, *, finished: bool = True) -> Score:
        """Return the score of an answer to one of these tasks.

        Raises:
            EpisodeFailedError: when it cannot be scored.
        """
        with self._lock:
            (outcome,) = self._scorer.score([(task, Transcript(answer, finished))])
        if isinstance(outcome, Failure):
            raise EpisodeFailedError(outcome.boundary, outcome.reason)
        return outcome

    def close(self) -> None:
        if "_scorer" in vars(self):
            vars(self).pop("_scorer").close()

    @cached_property
    def _scorer(self) -> Scorer:
        from perilune.verifiers.scorer import Scorer

        return Scorer(self._section)
