"""Parses the actions of an agent that explores a context: code, a single ask, or an answer.

Natural: a fenced block of Python or a `<tool_call>` of `ask`, and `<answer>...</answer>`. Compact: an answer
begins with `;`, and everything else is Python, or a range of lines such as `1-8` to ask about.
"""

import json
import re
from dataclasses import dataclass

from perilune.data.tool_calls import read_calls
from perilune.environments.builtin.tool_calls import Answer, InvalidAction, read_action
from perilune.environments.interpreter.interpreter import Call
from perilune.environments.interpreter.prompts import Style, Tool

_RANGE = re.compile(r"([1-9][0-9]{0,8})-([1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True)
class Code:
    """A block of Python."""

    text: str


@dataclass(frozen=True, slots=True)
class Ask:
    """A question about some lines of the context, from `first` to `last`, counted from 1."""

    text: str
    first: int
    last: int

    def question(self, context: str) -> str:
        """Return the message of the sub-agent."""
        lines = context.splitlines()[self.first - 1 : self.last]
        return "\n".join([*lines, *([self.text] if self.text else [])])


def parse_action(action: str, tool: Tool, style: Style) -> Code | Ask | Answer | InvalidAction:
    if tool == "ask":
        return _parse_compact_ask(action) if style == "compact" else _parse_natural_ask(action)
    parsed = read_action(action, compact=style == "compact")
    if isinstance(parsed, Answer | InvalidAction):
        return parsed
    return Code(parsed.arguments["code"]) if parsed.name == "python" else InvalidAction("the tool is Python")


def _parse_compact_ask(action: str) -> Ask | Answer | InvalidAction:
    if action.startswith(";"):
        return Answer(action.removeprefix(";"))
    lines = _RANGE.fullmatch(action)
    return Ask("", int(lines[1]), int(lines[2])) if lines else InvalidAction("neither lines nor an answer")


def parse_call(action: str) -> Call | Answer | InvalidAction:
    """Parse a natural action: `<tool_call>...</tool_call>`, of which the first counts, or an `<answer>`."""
    calls = read_calls(action)
    if calls is None:
        return InvalidAction("a malformed call")
    if calls[1]:
        name, arguments = calls[1][0]
        return Call(name, (), json.loads(arguments))
    parsed = read_action(action, compact=False)
    return parsed if isinstance(parsed, Answer) else InvalidAction("neither a call nor an <answer>")


def _parse_natural_ask(action: str) -> Ask | Answer | InvalidAction:
    call = parse_call(action)
    if not isinstance(call, Call):
        return call
    match call.function, call.named:
        case "ask", {"question": str(question), "first": int(first), "last": int(last)} if 0 < first <= last:
            return Ask(question, first, last)
    return InvalidAction("the only tool is ask, with question, first and last")
