"""Parses the actions of an agent that explores a context: code, a single ask, or an answer.

Natural: a fenced block of Python or a `<tool_call>` of `ask`, and `<answer>...</answer>`. Compact: an answer
begins with `;`, and everything else is Python, or a range of lines such as `1-8` to ask about.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from perilune.environments.builtin.tool_calls import Answer, Misunderstood, read_action
from perilune.environments.interpreter.prompts import Style, Tool
from perilune.environments.program.tool_calls import read_calls

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
        """What a sub-agent sees."""
        lines = context.splitlines()[self.first - 1 : self.last]
        return "\n".join([*lines, *([self.text] if self.text else [])])


def read(action: str, tool: Tool, style: Style) -> Code | Ask | Answer | Misunderstood:
    """Parse an action of an agent with this tool."""
    if tool == "ask":
        return _compact_ask(action) if style == "compact" else _natural_ask(action)
    found = read_action(action, compact=style == "compact")
    if isinstance(found, Answer | Misunderstood):
        return found
    return Code(found.arguments["code"]) if found.name == "python" else Misunderstood("the tool is Python")


def _compact_ask(action: str) -> Ask | Answer | Misunderstood:
    if action.startswith(";"):
        return Answer(action.removeprefix(";"))
    lines = _RANGE.fullmatch(action)
    return Ask("", int(lines[1]), int(lines[2])) if lines else Misunderstood("neither lines nor an answer")


def _natural_ask(action: str) -> Ask | Answer | Misunderstood:
    calls = read_calls(action)
    if calls is None:
        return Misunderstood("a malformed call")
    if calls[1]:
        return _ask(*calls[1][0])
    found = read_action(action, compact=False)
    return found if isinstance(found, Answer) else Misunderstood("neither a call nor an <answer>")


def _ask(name: str, arguments: str) -> Ask | Misunderstood:
    match name, json.loads(arguments):
        case "ask", {"question": str(question), "first": int(first), "last": int(last)} if 0 < first <= last:
            return Ask(question, first, last)
    return Misunderstood("the only tool is ask, with question, first and last")
