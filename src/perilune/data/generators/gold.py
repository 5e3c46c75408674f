"""The gold teacher: writes the answer that the environment itself states, for any family that states one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from perilune.data.generators.teacher import Candidate
from perilune.environments.compact import ANSWER_MARK
from perilune.environments.protocol import Task
from perilune.errors import RequestError


class GoldTeacher:
    """Answers at once, and right."""

    name = "gold"

    def candidates(self, tasks: Iterable[Task], seed: int) -> Iterator[Candidate]:
        """One candidate for each task that states its answer."""
        for task in tasks:
            answer = task.data.get("answer")
            if isinstance(answer, str):
                compact = task.prompt[-1]["content"] == task.data.get("compact")
                yield Candidate(task, ANSWER_MARK + answer if compact else answer, "gold")


def make(spec: Mapping[str, Any]) -> GoldTeacher:
    """Build the teacher; the factory behind the name "gold"."""
    for key in set(spec) - {"name"}:
        raise RequestError(f"the gold teacher has no field '{key}'", where=f"teacher.{key}")
    return GoldTeacher()
