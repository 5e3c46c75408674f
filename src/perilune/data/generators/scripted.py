"""Teachers that play an episode from a script: which strategy a task gets, and what each strategy does."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from perilune.data.generators.teacher import Candidate
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import Task


class ScriptedTeacher(ABC):
    """Base of a teacher that knows what to do: write `script`, and name the strategies there are.

    A digest of seed and task decides the strategy, so that it does not depend on what other tasks there are.
    """

    name: str
    strategies: ClassVar[Mapping[str, float]]

    def __init__(self, shares: Mapping[str, float]) -> None:
        self.shares = dict(shares)

    @abstractmethod
    def script(self, task: Task, strategy: str, chance: KeyedRandom) -> Sequence[str]:
        """The actions of a whole episode, or an answer alone; none: the task is left out.

        Args:
            chance: random numbers for this task, which follow from the seed.

        Raises:
            RequestError: when the task is not of an environment that the teacher knows.
        """

    def candidates(self, tasks: Iterable[Task], seed: int) -> Iterator[Candidate]:
        """At most one candidate a task.

        Raises:
            RequestError: as `script`.
        """
        for task in tasks:
            strategy = strategy_for(self.shares, seed, task.task_id)
            actions = self.script(task, strategy, KeyedRandom(seed, task.task_id))
            if actions:
                *earlier, last = actions
                yield Candidate(task, last, f"{self.name}/{strategy}", earlier=tuple(earlier))


def strategy_for(shares: Mapping[str, float], seed: int, task_id: str) -> str:
    """The strategy of a task: one of the shares, which seed and task alone decide."""
    draw = drawn(f"strategy:{seed}:{task_id}")
    for name, share in shares.items():
        draw -= share
        if draw < 0:
            return name
    return max(shares, key=lambda name: shares[name])


def drawn(key: str) -> float:
    """A number in [0, 1) that `key` alone decides."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big") / 2**48
