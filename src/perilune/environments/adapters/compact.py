"""Compact prompts: the question of a known family in a few characters, for character-level models.

The policy answers with `working;answer` or `;answer`. The text after the last semicolon is the answer.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from perilune.environments.adapters import scratchpad

Entry = Mapping[str, Any]

ANSWER_MARK = ";"
_UNORDERED = re.compile(r"((?:gcd|lcm)\(|)(\d+(?:,\d+)+)(\)=|>\d+=)")  # gcd, lcm and countdown


def _arithmetic_prompt(entry: Entry) -> str:
    """Return the expression without spaces. Plain sums and products have numbers of equal width."""
    expression: str = entry["metadata"]["expression"].replace(" ", "")
    if not (scratchpad.parse_terms(expression) or scratchpad.parse_factors(expression)):
        return expression + "="
    width = max(map(len, re.findall(r"\d+", expression)))
    return re.sub(r"\d+", lambda number: number[0].zfill(width), expression) + "="


def _numbers_prompt(function: str, key: str) -> Callable[[Entry], str]:
    def prompt(entry: Entry) -> str:
        return f"{function}({','.join(map(str, entry['metadata'][key]))})="

    return prompt


PROMPTS: Mapping[str, Callable[[Entry], str]] = {
    "basic_arithmetic": _arithmetic_prompt,
    "chain_sum": _arithmetic_prompt,
    "countdown": lambda e: f"{','.join(map(str, e['metadata']['numbers']))}>{e['metadata']['target']}=",
    "decimal_chain_sum": _arithmetic_prompt,
    "gcd": _numbers_prompt("gcd", "numbers"),
    "lcm": _numbers_prompt("lcm", "numbers"),
    "number_sequence": lambda e: e["question"].replace(" ", "").replace("?", "") + "=",
    "products": _arithmetic_prompt,
    "simple_equations": lambda e: (
        f"{e['metadata']['equation'].replace(' ', '')},{e['metadata']['variable']}="
    ),
    "spell_backward": lambda e: f"{e['metadata']['word']}<",
}

ARITHMETIC_FAMILIES = frozenset({"basic_arithmetic", "chain_sum", "products"})


def read_expression(prompt: str) -> str | None:
    """Return the expression of an arithmetic prompt: "347+268" for "347+268="; None for other prompts."""
    body = prompt.removesuffix("=")
    return body if scratchpad.write_working(body) is not None else None


def read_answer(text: str) -> str | None:
    """Return the text after the last semicolon; None if there is no semicolon."""
    _, mark, last = text.rpartition(ANSWER_MARK)
    return last if mark else None


def classify_strategy(text: str) -> str:
    """Return the strategy of an output: "direct", "brief", "scratchpad", or "none" without an answer."""
    before, mark, _ = text.rpartition(ANSWER_MARK)
    if not mark:
        return "none"
    if not before:
        return "direct"
    return "brief" if re.fullmatch(r"\d\d", re.split("[,/;]", before)[0]) else "scratchpad"


def arithmetic_metrics(prompt: str, text: str) -> dict[str, float]:
    """Return the metrics of a compact arithmetic output. They do not affect the reward.

    "strategy/NAME" is 1.0 for the recognized strategy. "trace_valid", present if there is working, is
    1.0 if every step is right.
    """
    name = classify_strategy(text)
    metrics = {f"strategy/{name}": 1.0}
    expression = read_expression(prompt)
    if name in ("brief", "scratchpad") and expression is not None:
        expected = scratchpad.write_working(expression, brief=name == "brief")
        metrics["trace_valid"] = float(text.rpartition(ANSWER_MARK)[0] == expected)
    return metrics


def canonical_question(question: str) -> str:
    """Return a canonical form that is equal for questions that differ only in the order of their operands.

    It determines the split, so that 268+347 is not held out while 347+268 is in training.
    """
    body = question.removesuffix("=")
    for kind, parse in (("terms", scratchpad.parse_terms), ("factors", scratchpad.parse_factors)):
        if (numbers := parse(body)) is not None:
            return f"{kind}{sorted(numbers)}"
    if (listed := _UNORDERED.fullmatch(question)) is not None:
        return f"{listed[1]}{','.join(sorted(listed[2].split(','), key=int))}{listed[3]}"
    return question


def arithmetic_difficulty(prompt: str) -> float | None:
    """Return the columns of the longest number times operations; for two summands, plus their carries."""
    expression = prompt.removesuffix("=")
    numbers = scratchpad.parse_terms(expression) or scratchpad.parse_factors(expression)
    if numbers is None:
        return None
    columns = max(len(str(abs(number))) for number in numbers) * max(len(numbers) - 1, 1)
    carries = 0
    if scratchpad.parse_terms(expression) and len(numbers) == 2 and min(numbers) >= 0:
        carries = scratchpad.count_carries(*numbers)
    return float(columns + carries)
