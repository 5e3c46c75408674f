"""Parses the actions of an agent that explores a context: code, a single ask, or an answer.

Natural: a fenced block of Python or a `<tool_call>` of `ask`, and `<answer>...</answer>`. Compact: an answer
begins with `;`, and everything else is Python, or a range of lines such as `1-8` to ask about.
"""

import json
import re
from dataclasses import dataclass

from perilune.data.tool_calls import read_calls
from perilune.environments.builtin.tool_calls import Answer, Misunderstood, read_action
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


def read_call(action: str) -> Call | Answer | Misunderstood:
    """Parse a natural action: `<tool_call>...</tool_call>`, of which the first counts, or an `<answer>`."""
    read = read_calls(action)
    if read is None:
        return Misunderstood("a malformed call")
    if read[1]:
        name, arguments = read[1][0]
        return Call(name, (), json.loads(arguments))
    found = read_action(action, compact=False)
    return found if isinstance(found, Answer) else Misunderstood("neither a call nor an <answer>")


def _natural_ask(action: str) -> Ask | Answer | Misunderstood:
    found = read_call(action)
    if not isinstance(found, Call):
        return found
    match found.function, found.named:
        case "ask", {"question": str(question), "first": int(first), "last": int(last)} if 0 < first <= last:
            return Ask(question, first, last)
    return Misunderstood("the only tool is ask, with question, first and last")
