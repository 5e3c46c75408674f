"""The base class of teachers that write episodes from a script."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from perilune.data.generators.teacher import Candidate
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import Task
from perilune.errors import RequestError

MAX_SKIPPED = 10_000  # tasks in a row; an environment may have endless tasks


class ScriptedTeacher(ABC):
    """Base of scripted teachers. Subclasses define `strategies` and `script`.

    A digest of seed and task decides the strategy, so it does not depend on other tasks.

    Attributes:
        supports: a key in the data of the supported tasks, and their environment in words; None: any task.
    """

    name: str
    strategies: ClassVar[Mapping[str, float]]
    supports: ClassVar[tuple[str, str] | None] = None

    def __init__(self, shares: Mapping[str, float]) -> None:
        self.shares = dict(shares)

    @abstractmethod
    def script(self, task: Task, strategy: str, chance: KeyedRandom) -> Sequence[str]:
        """Return all actions of an episode, or only an answer. The task is skipped if there are none.

        Args:
            chance: random numbers for this task, derived from the seed.

        Raises:
            RequestError: when the teacher does not support the task's environment.
        """

    def strategy(self, task: Task, seed: int) -> str:
        return choose_strategy(self.shares, f"strategy:{seed}:{task.task_id}")

    def candidates(self, tasks: Iterable[Task], seed: int) -> Iterator[Candidate]:
        """Yield at most one candidate per task.

        Raises:
            RequestError: as `script`, when the teacher does not support a task, and after `MAX_SKIPPED`
                skipped tasks in a row.
        """
        skipped = 0
        for task in tasks:
            if self.supports and self.supports[0] not in task.data:
                what = f"the {self.name} teacher supports only {self.supports[1]}"
                raise RequestError(what, where="teacher")
            strategy = self.strategy(task, seed)
            actions = self.script(task, strategy, KeyedRandom(seed, task.task_id))
            skipped = 0 if actions else skipped + 1
            if skipped == MAX_SKIPPED:
                raise RequestError(
                    f"the teacher '{self.name}' has no answer to {MAX_SKIPPED:,} tasks in a row",
                    where="teacher",
                    remedy="choose another teacher, or have the environment state answers with `gold`",
                )
            if actions:
                *earlier, last = actions
                yield Candidate(task, last, f"{self.name}/{strategy}", earlier=tuple(earlier))


def choose_strategy(shares: Mapping[str, float], key: str) -> str:
    """Return a strategy, drawn with its share as probability; depends only on `shares` and `key`."""
    draw = draw_uniform(key)
    for name, share in shares.items():
        draw -= share
        if draw < 0:
            return name
    return max(shares, key=lambda name: shares[name])


def draw_uniform(key: str) -> float:
    """Return a pseudo-random number in [0, 1) that depends only on `key`."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big") / 2**48
