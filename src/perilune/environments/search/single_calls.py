"""Parses an action that is one function call or an answer.

Natural: `<tool_call>{"name": "search", "arguments": {"query": "...", "k": 5}}</tool_call>`, or
`<answer>...</answer>`. Compact, for character-level models: `search('...',5)`, or `;...`.
"""

import ast

from perilune.environments.builtin.tool_calls import ANSWER_MARK, Answer, Misunderstood
from perilune.environments.interpreter.actions import read_call
from perilune.environments.interpreter.interpreter import Call

_LONGEST = 4000  # characters of a compact call


def read_single(text: str, *, compact: bool) -> Call | Answer | Misunderstood:
    """Parse an action. Only its first call counts."""
    if compact:
        if text.startswith(ANSWER_MARK):
            return Answer(text.removeprefix(ANSWER_MARK))
        return _read_compact(text)
    return read_call(text)


def _read_compact(text: str) -> Call | Misunderstood:
    try:
        found = ast.parse(text[:_LONGEST].strip(), mode="eval").body
        if isinstance(found, ast.Call) and isinstance(found.func, ast.Name):
            arguments = [ast.literal_eval(one) for one in found.args]
            named = {one.arg: ast.literal_eval(one.value) for one in found.keywords if one.arg}
            return Call(found.func.id, arguments, named)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    return Misunderstood("not a call of one function with literal arguments")
