"""Compact prompts: the question of a known family in a few characters, for character-level models.

The policy answers with `working;answer` or `;answer`. The text after the last semicolon is the answer.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from perilune.environments.adapters import scratchpad

Entry = Mapping[str, Any]

ANSWER_MARK = ";"


def _arithmetic(entry: Entry) -> str:
    """The expression without spaces. In plain sums and products all numbers are padded to one width."""
    expression: str = entry["metadata"]["expression"].replace(" ", "")
    if not (scratchpad.terms(expression) or scratchpad.factors(expression)):
        return expression + "="
    width = max(map(len, re.findall(r"\d+", expression)))
    return re.sub(r"\d+", lambda number: number[0].zfill(width), expression) + "="


def _numbers(function: str, key: str) -> Callable[[Entry], str]:
    def prompt(entry: Entry) -> str:
        return f"{function}({','.join(map(str, entry['metadata'][key]))})="

    return prompt


PROMPTS: Mapping[str, Callable[[Entry], str]] = {
    "basic_arithmetic": _arithmetic,
    "chain_sum": _arithmetic,
    "countdown": lambda e: f"{','.join(map(str, e['metadata']['numbers']))}>{e['metadata']['target']}=",
    "decimal_chain_sum": _arithmetic,
    "gcd": _numbers("gcd", "numbers"),
    "lcm": _numbers("lcm", "numbers"),
    "number_sequence": lambda e: e["question"].replace(" ", "").replace("?", "") + "=",
    "products": _arithmetic,
    "simple_equations": lambda e: (
        f"{e['metadata']['equation'].replace(' ', '')},{e['metadata']['variable']}="
    ),
    "spell_backward": lambda e: f"{e['metadata']['word']}<",
}

ARITHMETIC = frozenset({"basic_arithmetic", "chain_sum", "products"})


def expression(prompt: str) -> str | None:
    """The expression of a compact arithmetic prompt: "347+268" for "347+268=". None for any other prompt."""
    body = prompt.removesuffix("=")
    return body if scratchpad.working(body) is not None else None


def answer(text: str) -> str | None:
    """The text after the last semicolon; None if there is no semicolon."""
    _, mark, last = text.rpartition(ANSWER_MARK)
    return last if mark else None


def strategy(text: str) -> str:
    """The strategy of an output: "direct", "brief", "scratchpad", or "none" if it has no answer mark."""
    before, mark, _ = text.rpartition(ANSWER_MARK)
    if not mark:
        return "none"
    if not before:
        return "direct"
    return "brief" if re.fullmatch(r"\d\d", re.split("[,/;]", before)[0]) else "scratchpad"


def arithmetic_metrics(prompt: str, text: str) -> dict[str, float]:
    """Metrics of a compact arithmetic output. They do not affect the reward.

    "strategy/NAME" is 1.0 for the recognized strategy. "trace_valid", present if there is working, tells
    whether every step is right.
    """
    name = strategy(text)
    metrics = {f"strategy/{name}": 1.0}
    asked = expression(prompt)
    if name in ("brief", "scratchpad") and asked is not None:
        expected = scratchpad.working(asked, brief=name == "brief")
        metrics["trace_valid"] = float(text.rpartition(ANSWER_MARK)[0] == expected)
    return metrics


def same_question(question: str) -> str:
    """A canonical form that is equal for questions that differ only in the order of their operands.

    It determines the split, so that 268+347 is not held out while 347+268 is in training.
    """
    body = question.removesuffix("=")
    for parse in (scratchpad.terms, scratchpad.factors):
        if (numbers := parse(body)) is not None:
            return f"{parse.__name__}{sorted(numbers)}"
    return question


def arithmetic_difficulty(prompt: str) -> float | None:
    """Columns of the longest number times the number of operations; for two summands, plus their carries."""
    asked = prompt.removesuffix("=")
    numbers = scratchpad.terms(asked) or scratchpad.factors(asked)
    if numbers is None:
        return None
    columns = max(len(str(abs(number))) for number in numbers) * max(len(numbers) - 1, 1)
    carries = 0
    if scratchpad.terms(asked) and len(numbers) == 2 and min(numbers) >= 0:
        carries = scratchpad.carries(*numbers)
    return float(columns + carries)
