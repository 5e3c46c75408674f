"""What an action of a policy with tools asks for: a call, an answer, or nothing that can be understood.

In the natural form Python stands in a fenced block, and other tools are called as models trained to call them
do, `<tool_call>{"name": "list_files", "arguments": {}}</tool_call>`; the first of them counts. An answer is
`<answer>42</answer>` where nothing is called. In the compact form, for models that read characters, an answer
begins with `;` and everything else is Python.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANSWER_MARK = ";"
TOOLS: Mapping[str, tuple[str, ...]] = {
    "python": ("code",),
    "list_files": (),
    "read_file": ("path",),
    "write_file": ("path", "text"),
}
"""Tools, and the arguments that each takes, all of them texts."""

_CALL = re.compile(
    r"```(?:python|py)?[ \t]*\n(?P<code>.*?)```|<tool_call>(?P<call>.*?)</tool_call>",
    re.DOTALL | re.IGNORECASE,
)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool by name, and its arguments."""

    name: str
    arguments: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What ends the episode."""

    text: str


@dataclass(frozen=True, slots=True)
class Misunderstood:
    """Neither; `why` is told to the policy."""

    why: str


def read_action(action: str, *, compact: bool) -> Call | Answer | Misunderstood:
    """What `action` asks for."""
    if compact:
        if action.startswith(ANSWER_MARK):
            return Answer(action.removeprefix(ANSWER_MARK))
        return Call("python", {"code": action})
    found = _CALL.search(action)
    if found is None:
        answers = _ANSWER.findall(action)
        return Answer(answers[-1].strip()) if answers else Misunderstood("neither a call nor an <answer>")
    if found["code"] is not None:
        return Call("python", {"code": found["code"]})
    return _read_call(found["call"])


def _read_call(text: str) -> Call | Misunderstood:
    try:
        document: Any = json.loads(text)
        name, arguments = document["name"], document.get("arguments", {})
        wanted = TOOLS[name]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Misunderstood(f"not a call of one of {', '.join(TOOLS)}")
    if not isinstance(arguments, dict) or set(arguments) != set(wanted):
        return Misunderstood(f"{name} takes {', '.join(wanted) or 'no arguments'}")
    if not all(isinstance(value, str) for value in arguments.values()):
        return Misunderstood(f"every argument of {name} is a text")
    return Call(name, arguments)
