"""Parses an action that is one function call or an answer.

Natural: `<tool_call>{"name": "search", "arguments": {"query": "...", "k": 5}}</tool_call>`, or
`<answer>...</answer>`. Compact, for character-level models: `search('...',5)`, or `;...`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perilune.environments.builtin.tool_calls import ANSWER_MARK, Answer, Misunderstood, read_action
from perilune.environments.program.tool_calls import read_calls

_LONGEST = 4000  # characters of a compact call


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call with JSON values."""

    name: str
    arguments: Sequence[Any]
    named: Mapping[str, Any]


def read_single(text: str, *, compact: bool) -> FunctionCall | Answer | Misunderstood:
    """Parse an action. Only its first call counts."""
    if compact:
        if text.startswith(ANSWER_MARK):
            return Answer(text.removeprefix(ANSWER_MARK))
        return _read_compact(text)
    read = read_calls(text)
    if read is None:
        return Misunderstood("a malformed call")
    if read[1]:
        name, arguments = read[1][0]
        return FunctionCall(name, (), json.loads(arguments))
    found = read_action(text, compact=False)
    return found if isinstance(found, Answer) else Misunderstood("neither a call nor an <answer>")


def _read_compact(text: str) -> FunctionCall | Misunderstood:
    try:
        found = ast.parse(text[:_LONGEST].strip(), mode="eval").body
        if isinstance(found, ast.Call) and isinstance(found.func, ast.Name):
            arguments = [ast.literal_eval(one) for one in found.args]
            named = {one.arg: ast.literal_eval(one.value) for one in found.keywords if one.arg}
            return FunctionCall(found.func.id, arguments, named)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    return Misunderstood("not a call of one function with literal arguments")
