"""The calculator's teacher: works a question out with the calculator, or answers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from perilune.data.generators.scripted import ScriptedTeacher
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import Task
from perilune.errors import RequestError


class CalculatorTeacher(ScriptedTeacher):
    """Writes one episode a task.

    * calculator: every operation by the calculator, then the answer,
    * guess: the answer at once, which is right, and more than a small model can learn to find.
    """

    name = "calculator"
    strategies: ClassVar = {"calculator": 0.3, "guess": 0.7}

    def script(self, task: Task, strategy: str, chance: KeyedRandom) -> Sequence[str]:
        """Calls of the calculator, and the answer.

        Raises:
            RequestError: when a task is not of the calculator's environment.
        """
        if "actions" not in task.data:
            raise RequestError(
                "the calculator teacher knows the environment 'calculator' alone", where="teacher"
            )
        actions: Sequence[str] = task.data["actions"]
        return actions if strategy == "calculator" else actions[-1:]
