"""Answer formats: the instruction to mark an answer, and the parser that finds it in a text.

A text may mark several answers, quote the instruction, or nest marks. It has an answer only if all marked
answers are equal, so that a policy cannot guess several times. The reasoning before `</think>` is not
searched.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from perilune.environments.core.matching import find_plain_numbers, normalize_number
from perilune.files import reject_constant

FormatName = Literal["answer_tags", "boxed", "json", "last_number", "after_think"]
THINK_END = "</think>"
_JSON_START = re.compile(r'\{(?=\s*")')  # unlike braces of LaTeX or code
_MAX_JSON_OBJECTS = 200  # in one text; bounds the time that a hostile text can take


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """One way to mark an answer.

    Attributes:
        before, after: the text around an answer in this format.
        find_answers: returns all answers that a text marks; none if a mark is open, or marks are nested.
    """

    instruction: str
    before: str
    after: str
    find_answers: Callable[[str], list[str]]

    def write(self, answer: str) -> str:
        inner = (
            json.dumps(answer, ensure_ascii=False)[1:-1]
            if self.find_answers is _find_json_answers
            else answer
        )
        return f"{self.before}{inner}{self.after}"

    def parse(self, text: str, quoted: frozenset[str] = frozenset()) -> str | None:
        """Return the answer that `text` marks; None if it marks none, an empty one, or different ones.

        Args:
            quoted: answers in the instruction itself (`distinct_answers`), which a text that quotes it
                repeats. They do not count.
        """
        answers = self.distinct_answers(text) - quoted
        return next(iter(answers)) or None if len(answers) == 1 else None

    def distinct_answers(self, text: str) -> frozenset[str]:
        """Return all answers that `text` marks, which may contradict each other."""
        return frozenset(answer.strip() for answer in self.find_answers(text))


def _strip_thinking(text: str) -> str:
    return text.rpartition(THINK_END)[2]


def _find_tagged(text: str) -> list[str]:
    parts = re.split(r"(</?answer>)", _strip_thinking(text))
    marks, between = parts[1::2], parts[2::2]
    if marks != ["<answer>", "</answer>"] * (len(marks) // 2):
        return []
    return between[::2]


def _find_boxed(text: str) -> list[str]:
    """Return the contents of `\\boxed{}` with balanced braces."""
    text = _strip_thinking(text)
    contents: list[str] = []
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
        contents.append(text[start : brace.start()])
        end = brace.end()
    return [] if any("\\boxed" in content for content in contents) else contents


def _find_json_answers(text: str) -> list[str]:
    """Return the field "answer" of all JSON objects that are in no other object."""
    text = _strip_thinking(text)
    decoder = json.JSONDecoder(object_pairs_hook=_reject_duplicate_keys, parse_constant=reject_constant)
    answers: list[str] = []
    end = 0
    for _ in range(_MAX_JSON_OBJECTS):
        opening = _JSON_START.search(text, end)
        if opening is None:
            return answers
        start = opening.start()
        try:
            value, end = decoder.raw_decode(text, start)
        except _DuplicateKeyError:
            return []
        except (ValueError, RecursionError):
            end = start + 1
            continue
        if value.get("answer") is not None:
            answer = value["answer"]
            answers.append(answer if isinstance(answer, str) else json.dumps(answer))
    return []


class _DuplicateKeyError(Exception):
    pass


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise _DuplicateKeyError
    return fields


def _find_last_number(text: str) -> list[str]:
    """Return the number that ends a text, apart from closing punctuation."""
    text = _strip_thinking(text)
    numbers = find_plain_numbers(text)
    if not numbers or text[: numbers[-1].start()].endswith(("-", "+", "\u2212")):  # two signs make no number
        return []
    if text[numbers[-1].end() :].strip(" \n\t.!?)*_$\"'”’"):
        return []
    return [normalize_number(numbers[-1][0])]


def _find_after_think(text: str) -> list[str]:
    parts = re.split(r"</?think>", text)
    return parts[-1:] if text.count(THINK_END) == 1 and text.rfind("<think>") < text.find(THINK_END) else []


FORMATS: Mapping[FormatName, AnswerFormat] = {
    "answer_tags": AnswerFormat(
        "End with the final answer between tags: <answer>your answer</answer>",
        "<answer>",
        "</answer>",
        _find_tagged,
    ),
    "boxed": AnswerFormat(
        "End with the final answer in a box: \\boxed{your answer}", "\\boxed{", "}", _find_boxed
    ),
    "json": AnswerFormat(
        'End with the final answer as JSON: {"answer": "your answer"}',
        '{"answer": "',
        '"}',
        _find_json_answers,
    ),
    "last_number": AnswerFormat("End with the final answer as a number.", "", "", _find_last_number),
    "after_think": AnswerFormat(
        "Think first. After </think> write only the final answer.", "</think>\n", "", _find_after_think
    ),
}
