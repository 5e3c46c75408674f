"""The arguments of the functions `ask` and `ask_all`."""

from dataclasses import dataclass
from typing import Any

from perilune.environments.interpreter.interpreter import Call, InvalidCallError

FUNCTIONS = ("ask", "ask_all")


@dataclass(frozen=True, slots=True)
class Question:
    """What a sub-agent is asked.

    Attributes:
        context: the text that it explores; empty if `text` is all that it needs.
    """

    text: str
    context: str = ""


def questions(call: Call) -> list[Question]:
    """The questions of a call of `ask` or `ask_all`.

    Raises:
        InvalidCallError: when the arguments are not those of the function.
    """
    bind = {"ask": _one, "ask_all": _several}[call.function]
    try:
        asked = bind(*call.arguments, **call.named)
    except TypeError as error:
        raise InvalidCallError(str(error).replace(bind.__name__, call.function)) from None
    if not all(isinstance(one.text, str) and isinstance(one.context, str) for one in asked):
        raise InvalidCallError(f"{call.function} takes texts")
    return asked


def _one(question: Any, context: Any = "") -> list[Question]:
    return [Question(question, context)]


def _several(questions: Any, contexts: Any = None) -> list[Question]:
    if not isinstance(questions, list) or not isinstance(contexts, list | None):
        raise InvalidCallError("ask_all takes a list of questions and, possibly, a list of contexts")
    if contexts is not None and len(contexts) != len(questions):
        raise InvalidCallError(f"ask_all got {len(questions)} questions and {len(contexts)} contexts")
    return [Question(*pair) for pair in zip(questions, contexts or [""] * len(questions), strict=True)]
