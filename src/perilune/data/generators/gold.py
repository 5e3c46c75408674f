"""The gold teacher: writes the answer that the environment itself states, for any family that states one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from perilune.data.generators.teacher import Candidate
from perilune.environments.adapters.compact import ANSWER_MARK
from perilune.environments.core.protocol import Task


class GoldTeacher:
    """Answers at once, and right; tasks that state no answer are left out."""

    name = "gold"
    strategies: ClassVar = {"direct": 1.0}

    def __init__(self, shares: Mapping[str, float]) -> None:
        self.shares = dict(shares)

    def candidates(self, tasks: Iterable[Task], seed: int) -> Iterator[Candidate]:
        """One candidate for each task that states its answer, or its actions where it has several turns."""
        for task in tasks:
            if task.data.get("actions"):
                *earlier, last = task.data["actions"]
                yield Candidate(task, last, "gold/direct", earlier=tuple(earlier))
                continue
            answer = task.data.get("answer")
            if isinstance(answer, str):
                compact = task.prompt[-1]["content"] == task.data.get("compact")
                yield Candidate(task, ANSWER_MARK + answer if compact else answer, "gold/direct")
