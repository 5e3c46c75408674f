"""The gold teacher: writes the answer that the environment states."""

from collections.abc import Sequence
from typing import Any, ClassVar

from perilune.data.generators.scripted import ScriptedTeacher
from perilune.environments.adapters.compact import ANSWER_MARK
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.mixture import find_part
from perilune.environments.core.prompting import PROMPTING_KEY, PromptingSettings
from perilune.environments.core.protocol import Environment, Task


class GoldTeacher(ScriptedTeacher):
    """Gives the right answer at once; skips tasks without one, or whose answer holds for one seed only."""

    name = "gold"
    strategies: ClassVar = {"direct": 1.0}
    _environment: Environment | None = None

    def prepare(self, environment: Environment) -> None:
        """Use answers and the answer format of this environment."""
        self._environment = environment

    def script(self, task: Task, strategy: str, chance: KeyedRandom) -> Sequence[str]:
        """Return the task's actions, its answer, or the actions that the environment's `gold` states."""
        if task.data.get("actions"):
            actions: Sequence[str] = task.data["actions"]
            return [self._write(task, action) for action in actions]
        answer = task.data.get("answer")
        if not isinstance(answer, str):
            stated = getattr(self._environment, "gold", lambda task: None)(task)
            return () if stated is None or stated.seed else stated.actions
        compact = task.prompt[-1]["content"] == task.data.get("compact")
        return (ANSWER_MARK + answer if compact else self._write(task, answer),)

    def _write(self, task: Task, answer: str) -> str:
        """Return the answer in the format of the environment's `prompting` section, if it has one."""
        environment: Any = None if self._environment is None else find_part(self._environment, task)
        has_format = isinstance(getattr(environment, PROMPTING_KEY, None), PromptingSettings)
        return environment.write(answer) if has_format else answer
