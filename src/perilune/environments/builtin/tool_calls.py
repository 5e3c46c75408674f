"""Parses an action of a policy with tools: a call, an answer, or neither.

In the natural form, Python is in a fenced block and other tools are called in the common format
`<tool_call>{"name": "list_files", "arguments": {}}</tool_call>`. The first call counts. `<answer>42</answer>`
is the answer if there is no call. In the compact form, for character-level models, an answer begins with `;`
and everything else is Python.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANSWER_MARK = ";"
MAX_COMPACT_CHARS = 24  # characters of a tool's output in the compact form
TOOLS: Mapping[str, tuple[str, ...]] = {
    "python": ("code",),
    "list_files": (),
    "read_file": ("path",),
    "write_file": ("path", "text"),
}
"""Tools and the names of their arguments, which are all strings."""

_CALL = re.compile(
    r"```(?:python|py)?[ \t]*\n(?P<code>.*?)```|<tool_call>(?P<call>.*?)</tool_call>"
    r"|```[^\n`]+\n(?:(?!<tool_call>|```\w).)*?```(?!\w)",  # a block of another language, which is no call
    re.DOTALL | re.IGNORECASE,
)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call."""

    name: str
    arguments: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, which ends the episode."""

    text: str


@dataclass(frozen=True, slots=True)
class InvalidAction:
    """Neither a call nor an answer. The policy sees `reason`."""

    reason: str


def read_action(action: str, *, compact: bool) -> Call | Answer | InvalidAction:
    if compact:
        if action.startswith(ANSWER_MARK):
            return Answer(action.removeprefix(ANSWER_MARK))
        return Call("python", {"code": action})
    calls = (found for found in _CALL.finditer(action) if found.lastgroup is not None)
    match = next(calls, None)
    if match is None:
        answers = _ANSWER.findall(action)
        return Answer(answers[-1].strip()) if answers else InvalidAction("neither a call nor an <answer>")
    if match["code"] is not None:
        return Call("python", {"code": match["code"]})
    return _read_call(match["call"])


def _read_call(text: str) -> Call | InvalidAction:
    try:
        document: Any = json.loads(text)
        name, arguments = document["name"], document.get("arguments", {})
        parameters = TOOLS[name]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return InvalidAction(f"not a call of one of {', '.join(TOOLS)}")
    if not isinstance(arguments, dict) or set(arguments) != set(parameters):
        return InvalidAction(f"{name} takes {', '.join(parameters) or 'no arguments'}")
    if not all(isinstance(value, str) for value in arguments.values()):
        return InvalidAction(f"every argument of {name} is a text")
    return Call(name, arguments)


def render_output(output: str, *, compact: bool) -> str:
    """Return the output of a tool as the policy sees it; the compact form has its last word alone."""
    if compact:
        *_, last = ["", *output.split()]
        return f"={last[:MAX_COMPACT_CHARS]}\n"
    return output or "(no output)"
