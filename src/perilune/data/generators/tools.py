"""The teacher of tasks with tools: runs the solution, looks at the files first, or answers at once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from perilune.data.generators.teacher import Candidate
from perilune.environments.core.protocol import Task
from perilune.errors import RequestError


class ToolsTeacher:
    """Writes one episode a task; a digest of seed and task decides by which strategy.

    * solve: the solution as Python, then the answer that it prints,
    * careful: the files first, each printed, then the same,
    * guess: the answer at once, which is right, and nothing that a policy could know.

    Tasks whose result is a file or a function cannot be guessed; they are solved.
    """

    name = "tools"
    strategies: ClassVar = {"solve": 0.3, "careful": 0.0, "guess": 0.7}

    def __init__(self, shares: Mapping[str, float]) -> None:
        self.shares = dict(shares)

    def candidates(self, tasks: Iterable[Task], seed: int) -> Iterator[Candidate]:
        """One candidate a task.

        Raises:
            RequestError: when a task is not of the environment with tools.
        """
        for task in tasks:
            if not {"solution", "actions", "files"} <= set(task.data):
                raise RequestError("the teacher tools knows the environment 'tools' alone", where="teacher")
            solved, answer = task.data["actions"]
            strategy = self._strategy(seed, task)
            earlier = {"guess": (), "solve": (solved,), "careful": (*_looks(task), solved)}[strategy]
            yield Candidate(task, answer, f"tools/{strategy}", earlier=earlier)

    def _strategy(self, seed: int, task: Task) -> str:
        digest = hashlib.sha256(f"{seed}:{task.task_id}".encode()).digest()
        draw = int.from_bytes(digest[:6], "big") / 2**48
        for name, share in self.shares.items():
            draw -= share
            if draw < 0:
                cannot_guess = task.data["outputs"] or task.data["function"]
                return "solve" if name == "guess" and cannot_guess else name
        return "solve"


def _looks(task: Task) -> list[str]:
    """An action for each file, which prints it, in the form of the task's own actions."""
    fenced = task.data["actions"][0].startswith("```")
    looks = [f"print(open({name!r}).read())" for name in task.data["files"]]
    return [f"```python\n{code}\n```" for code in looks] if fenced else looks
