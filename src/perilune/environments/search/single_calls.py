"""Parses an action that is one function call or an answer.

Natural: `<tool_call>{"name": "search", "arguments": {"query": "...", "k": 5}}</tool_call>`, or
`<answer>...</answer>`. Compact, for character-level models: `search('...',5)`, or `;...`.
"""

import ast

from perilune.environments.builtin.tool_calls import ANSWER_MARK, Answer, InvalidAction
from perilune.environments.interpreter.actions import parse_call
from perilune.environments.interpreter.interpreter import Call

_MAX_CALL_CHARS = 4000  # characters of a compact call


def parse_single_call(text: str, *, compact: bool) -> Call | Answer | InvalidAction:
    """Parse an action. Only its first call counts."""
    if compact:
        if text.startswith(ANSWER_MARK):
            return Answer(text.removeprefix(ANSWER_MARK))
        return _parse_compact(text)
    return parse_call(text)


def _parse_compact(text: str) -> Call | InvalidAction:
    try:
        call = ast.parse(text[:_MAX_CALL_CHARS].strip(), mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            arguments = [ast.literal_eval(arg) for arg in call.args]
            named = {arg.arg: ast.literal_eval(arg.value) for arg in call.keywords if arg.arg}
            return Call(call.func.id, arguments, named)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    return InvalidAction("not a call of one function with literal arguments")
