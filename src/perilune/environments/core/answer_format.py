"""Answer formats: how a model is asked to mark its answer, and how the marked answer is found in its text.

A text may mark several answers, quote the instruction, or nest marks. It has an answer only if all answers
that it marks are the same one; anything else is no answer, so that a policy cannot guess several times. What
a reasoning model writes up to `</think>` is not searched.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from perilune.environments.core.matching import plain_digits, plain_numbers

FormatName = Literal["answer_tags", "boxed", "json", "last_number", "after_think"]
THINK_END = "</think>"
_MOST_OBJECTS = 200  # in one text; bounds the time that a hostile text can take


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """One way to mark an answer.

    Attributes:
        instruction: the sentence that asks for it.
        before, after: the text around an answer in this format.
        marked: all answers that a text marks; empty if a mark is not closed, or marks are nested.
    """

    instruction: str
    before: str
    after: str
    marked: Callable[[str], list[str]]

    def write(self, answer: str) -> str:
        """The answer in this format."""
        inner = json.dumps(answer, ensure_ascii=False)[1:-1] if self.marked is _json_fields else answer
        return f"{self.before}{inner}{self.after}"

    def parse(self, text: str, quoted: frozenset[str] = frozenset()) -> str | None:
        """The answer that `text` marks; None if it marks none, an empty one, or different ones.

        Args:
            quoted: answers that the instruction itself marks (`all_marked`), which a text that quotes it
                repeats. They do not count.
        """
        answers = self.all_marked(text) - quoted
        return next(iter(answers)) or None if len(answers) == 1 else None

    def all_marked(self, text: str) -> frozenset[str]:
        """All answers that `text` marks, which may contradict each other."""
        return frozenset(answer.strip() for answer in self.marked(text))


def _after_thinking(text: str) -> str:
    return text.rpartition(THINK_END)[2]


def _tags(text: str) -> list[str]:
    parts = re.split(r"(</?answer>)", _after_thinking(text))
    marks, between = parts[1::2], parts[2::2]
    if marks != ["<answer>", "</answer>"] * (len(marks) // 2):
        return []
    return between[::2]


def _boxes(text: str) -> list[str]:
    """The contents of `\\boxed{}` with balanced braces."""
    text = _after_thinking(text)
    found: list[str] = []
    end = 0
    while (start := text.find("\\boxed{", end)) >= 0:
        start += len("\\boxed{")
        depth = 1
        for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                break
        else:
            return []
        found.append(text[start : brace.start()])
        end = brace.end()
    return [] if any("\\boxed" in one for one in found) else found


def _json_fields(text: str) -> list[str]:
    """The field "answer" of all JSON objects that are in no other object."""
    text = _after_thinking(text)
    decoder = json.JSONDecoder(object_pairs_hook=_distinct, parse_constant=_refuse)
    found: list[str] = []
    end = 0
    for _ in range(_MOST_OBJECTS):
        start = text.find("{", end)
        if start < 0:
            return found
        try:
            value, end = decoder.raw_decode(text, start)
        except _DuplicateKeyError:
            return []
        except (ValueError, RecursionError):
            end = start + 1
            continue
        if value.get("answer") is not None:
            answer = value["answer"]
            found.append(answer if isinstance(answer, str) else json.dumps(answer))
    return []


class _DuplicateKeyError(Exception):
    pass


def _distinct(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise _DuplicateKeyError
    return fields


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _last_number(text: str) -> list[str]:
    """The number that ends a text, apart from closing punctuation."""
    text = _after_thinking(text)
    numbers = plain_numbers(text)
    if not numbers or text[: numbers[-1].start()].endswith(("-", "+", "\u2212")):  # two signs make no number
        return []
    if text[numbers[-1].end() :].strip(" \n\t.!?)*_$\"'”’"):
        return []
    return [plain_digits(numbers[-1][0])]


def _after_think(text: str) -> list[str]:
    parts = re.split(r"</?think>", text)
    return parts[-1:] if text.count(THINK_END) == 1 and text.rfind("<think>") < text.find(THINK_END) else []


FORMATS: Mapping[FormatName, AnswerFormat] = {
    "answer_tags": AnswerFormat(
        "End with the final answer between tags: <answer>your answer</answer>", "<answer>", "</answer>", _tags
    ),
    "boxed": AnswerFormat(
        "End with the final answer in a box: \\boxed{your answer}", "\\boxed{", "}", _boxes
    ),
    "json": AnswerFormat(
        'End with the final answer as JSON: {"answer": "your answer"}', '{"answer": "', '"}', _json_fields
    ),
    "last_number": AnswerFormat("End with the final answer as a number.", "", "", _last_number),
    "after_think": AnswerFormat(
        "Think first. After </think> write only the final answer.", "</think>\n", "", _after_think
    ),
}
