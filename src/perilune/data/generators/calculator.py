"""The calculator's teacher: answers with the calculator or directly."""

from collections.abc import Sequence
from typing import ClassVar

from perilune.data.generators.scripted import ScriptedTeacher
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import Task


class CalculatorTeacher(ScriptedTeacher):
    """Writes one episode per task.

    * calculator: computes every operation with the calculator, then answers,
    * guess: gives the right answer at once, which a small model cannot learn.
    """

    name = "calculator"
    strategies: ClassVar = {"calculator": 0.3, "guess": 0.7}
    supports = ("actions", "the environment 'calculator'")

    def script(self, task: Task, strategy: str, chance: KeyedRandom) -> Sequence[str]:
        """Calls of the calculator, and the answer."""
        actions: Sequence[str] = task.data["actions"]
        return actions if strategy == "calculator" else actions[-1:]
