"""The gold teacher: writes the answer that the environment states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from perilune.data.generators.scripted import ScriptedTeacher
from perilune.environments.adapters.compact import ANSWER_MARK
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import Task


class GoldTeacher(ScriptedTeacher):
    """Gives the right answer at once; skips tasks that do not state one."""

    name = "gold"
    strategies: ClassVar = {"direct": 1.0}

    def script(self, task: Task, strategy: str, chance: KeyedRandom) -> Sequence[str]:
        """The actions of a task with several turns, or its answer."""
        if task.data.get("actions"):
            actions: Sequence[str] = task.data["actions"]
            return actions
        answer = task.data.get("answer")
        if not isinstance(answer, str):
            return ()
        compact = task.prompt[-1]["content"] == task.data.get("compact")
        return (ANSWER_MARK + answer if compact else answer,)
