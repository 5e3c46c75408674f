"""The arguments of the functions `ask` and `ask_all`."""

from dataclasses import dataclass
from typing import Any

from perilune.environments.interpreter.interpreter import Call, InvalidCallError

FUNCTIONS = ("ask", "ask_all")


@dataclass(frozen=True, slots=True)
class Question:
    """A question to a sub-agent.

    Attributes:
        context: the text that it explores; empty if there is none.
    """

    text: str
    context: str = ""


def parse_questions(call: Call) -> list[Question]:
    """Return the questions of a call of `ask` or `ask_all`.

    Raises:
        InvalidCallError: when the arguments are not those of the function.
    """
    bind = {"ask": _bind_ask, "ask_all": _bind_ask_all}[call.function]
    try:
        questions = bind(*call.arguments, **call.named)
    except TypeError as error:
        raise InvalidCallError(str(error).replace(bind.__name__, call.function)) from None
    if not all(
        isinstance(question.text, str) and isinstance(question.context, str) for question in questions
    ):
        raise InvalidCallError(f"{call.function} takes texts")
    return questions


def _bind_ask(question: Any, context: Any = "") -> list[Question]:
    return [Question(question, context)]


def _bind_ask_all(questions: Any, contexts: Any = None) -> list[Question]:
    if not isinstance(questions, list) or not isinstance(contexts, list | None):
        raise InvalidCallError("ask_all takes a list of questions and, possibly, a list of contexts")
    if contexts is not None and len(contexts) != len(questions):
        raise InvalidCallError(f"ask_all got {len(questions)} questions and {len(contexts)} contexts")
    return [Question(*pair) for pair in zip(questions, contexts or [""] * len(questions), strict=True)]
