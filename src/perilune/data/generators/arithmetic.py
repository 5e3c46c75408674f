"""The arithmetic teacher: answers arithmetic prompts directly or with working."""

import re
from collections.abc import Callable, Sequence
from typing import ClassVar

from perilune.data.generators.scripted import ScriptedTeacher, draw_uniform
from perilune.environments.adapters import compact, scratchpad
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import Environment, Task
from perilune.errors import RequestError


class ArithmeticTeacher(ScriptedTeacher):
    """Writes one trace per task.

    For "347+268=" the strategies write

    * scratchpad: `78015,46111,32106;615`, every column with its digits and carry,
    * brief: `15,11,06;615`, the result of each column alone,
    * careless: `78015,46131,32106;615`, a scratchpad with one wrong digit and the right answer, as occurs in
      data that was verified by the answer alone,
    * direct: `;615`, no working.

    For the family's own wording of "4 + 38 - 17 =" the strategies write

    * steps: a line per operation, `4 + 38 = 42`, `42 - 17 = 25`, then `<answer>25</answer>`,
    * direct: `<answer>25</answer>`.

    If the environment asks for an answer format, the answer has that format instead of the tags.
    """

    name = "arithmetic"
    strategies: ClassVar = {"scratchpad": 0.4, "brief": 0.0, "careless": 0.0, "steps": 0.0, "direct": 0.6}

    write_answer: Callable[[str], str] = "<answer>{}</answer>".format

    def prepare(self, environment: Environment) -> None:
        """Write answers in the environment's answer format, if it asks for one."""
        if getattr(environment, "form", None) is not None:
            self.write_answer = environment.write  # type: ignore[attr-defined]

    def script(self, task: Task, strategy: str, chance: KeyedRandom) -> Sequence[str]:
        """Return the answer.

        Raises:
            RequestError: when the prompt is not a sum or product, or the strategy does not suit its wording.
        """
        return (write_trace(task, strategy, self.write_answer),)


def write_trace(task: Task, strategy: str, write_answer: Callable[[str], str]) -> str:
    """Return the answer with the working of `strategy`, in the form that the task's prompt asks for.

    Args:
        write_answer: puts the answer to the family's own wording into an answer format.

    Raises:
        RequestError: when the prompt is not a sum or product, or the strategy does not suit its wording.
    """
    prompt = task.prompt[-1]["content"]
    short = task.data.get("compact", "")
    expression = compact.read_expression(short)
    if expression is None:
        raise RequestError(
            f"the arithmetic teacher cannot compute {prompt[:80]!r}",
            where="teacher",
            remedy="use chain_sum, products or basic_arithmetic "
            "(the last with either + and -, or *, and without parentheses)",
        )
    wording = "compact" if prompt == short else "original"
    if strategy != "direct" and (strategy == "steps") != (wording == "original"):
        raise RequestError(
            f"the arithmetic teacher has no strategy '{strategy}' for `prompt: {wording}`",
            where="strategies",
            remedy="steps and direct are for `prompt: original`; the others for `prompt: compact`",
        )
    if wording == "original":
        lines = _steps(expression) if strategy == "steps" else []
        return "\n".join([*lines, write_answer(task.data["answer"])])
    working = (
        "" if strategy == "direct" else scratchpad.write_working(expression, brief=strategy == "brief") or ""
    )
    if strategy == "careless":
        working = _slip(working, task.task_id)
    return f"{working}{compact.ANSWER_MARK}{task.data['answer']}"


def _steps(expression: str) -> list[str]:
    """Return one equation per operation, from left to right: "4 + 38 = 42", "42 - 17 = 25"."""
    numbers, sign = scratchpad.parse_terms(expression), "+"
    if numbers is None:
        numbers, sign = scratchpad.parse_factors(expression) or (), "*"
    lines = []
    total = numbers[0]
    for number in numbers[1:]:
        if sign == "*":
            result = total * number
        else:
            sign, result = "-" if number < 0 else "+", total + number
        lines.append(f"{total} {sign} {abs(number)} = {result}")
        total = result
    return lines


def _slip(working: str, task_id: str) -> str:
    """Return `working` with one wrong digit."""
    offsets = [match.start() for match in re.finditer(r"\d", working)]
    if not offsets:
        return working
    offset = offsets[int(draw_uniform(f"place:{task_id}") * len(offsets))]
    digit = (int(working[offset]) + 1 + int(draw_uniform(f"digit:{task_id}") * 9)) % 10
    return f"{working[:offset]}{digit}{working[offset + 1 :]}"
