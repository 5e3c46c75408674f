"""The arithmetic teacher: answers compact arithmetic prompts directly or with working."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from perilune.data.generators.scripted import ScriptedTeacher, drawn
from perilune.environments.adapters import compact, scratchpad
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import Task
from perilune.errors import RequestError


class ArithmeticTeacher(ScriptedTeacher):
    """Writes one trace per task.

    For "347+268=" the strategies write

    * scratchpad: `78015,46111,32106;615`, every column with its digits and carry,
    * brief: `15,11,06;615`, the result of each column alone,
    * careless: `78015,46131,32106;615`, a scratchpad with one wrong digit and the right answer, as occurs in
      data that was verified by the answer alone,
    * direct: `;615`, no working.
    """

    name = "arithmetic"
    strategies: ClassVar = {"scratchpad": 0.4, "brief": 0.0, "careless": 0.0, "direct": 0.6}

    def script(self, task: Task, strategy: str, chance: KeyedRandom) -> Sequence[str]:
        """The answer.

        Raises:
            RequestError: when the prompt is not a compact sum or product.
        """
        return (write_trace(task, strategy),)


def write_trace(task: Task, strategy: str) -> str:
    """The answer "working;answer", with the working of `strategy`.

    Raises:
        RequestError: when the prompt is not a compact sum or product.
    """
    prompt = task.prompt[-1]["content"]
    expression = compact.expression(prompt)
    if expression is None:
        raise RequestError(
            f"the arithmetic teacher cannot compute {prompt[:80]!r}",
            where="teacher",
            remedy="use `prompt: compact` of chain_sum, products or basic_arithmetic "
            "(the last with either + and -, or *, and without parentheses)",
        )
    working = "" if strategy == "direct" else scratchpad.working(expression, brief=strategy == "brief") or ""
    if strategy == "careless":
        working = _slip(working, task.task_id)
    return f"{working}{compact.ANSWER_MARK}{task.data['answer']}"


def _slip(working: str, task_id: str) -> str:
    """`working` with one wrong digit."""
    places = [match.start() for match in re.finditer(r"\d", working)]
    if not places:
        return working
    place = places[int(drawn(f"place:{task_id}") * len(places))]
    digit = (int(working[place]) + 1 + int(drawn(f"digit:{task_id}") * 9)) % 10
    return f"{working[:place]}{digit}{working[place + 1 :]}"
