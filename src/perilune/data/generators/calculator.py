"""The calculator's teacher: works a question out with the calculator, or answers at once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from perilune.data.generators.teacher import Candidate
from perilune.environments.protocol import Task
from perilune.errors import RequestError


class CalculatorTeacher:
    """Writes one episode a task; a digest of seed and task decides by which strategy.

    * calculator: every operation by the calculator, then the answer,
    * guess: the answer at once, which is right, and more than a small model can learn to find.
    """

    name = "calculator"
    strategies: ClassVar = {"calculator": 0.3, "guess": 0.7}

    def __init__(self, shares: Mapping[str, float]) -> None:
        self.shares = dict(shares)

    def candidates(self, tasks: Iterable[Task], seed: int) -> Iterator[Candidate]:
        """One candidate a task.

        Raises:
            RequestError: when a task is not of the calculator's environment.
        """
        for task in tasks:
            if "actions" not in task.data:
                raise RequestError(
                    "the calculator teacher knows the environment 'calculator' alone", where="teacher"
                )
            *earlier, answer = task.data["actions"]
            strategy = self._strategy(seed, task.task_id)
            calls = tuple(earlier) if strategy == "calculator" else ()
            yield Candidate(task, answer, f"calculator/{strategy}", earlier=calls)

    def _strategy(self, seed: int, task_id: str) -> str:
        digest = hashlib.sha256(f"{seed}:{task_id}".encode()).digest()
        share = int.from_bytes(digest[:6], "big") / 2**48
        return "calculator" if share < self.shares.get("calculator", 0.0) else "guess"
