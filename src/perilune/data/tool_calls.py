"""Tool calls in text, in the format of Hermes and Qwen.

<tool_call>{"name": "f", "arguments": {}}</tool_call>
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ToolCall = tuple[str, str]
"""The name of a tool, and the arguments as canonical JSON."""

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_INSTRUCTIONS = """\
You may call these tools:
{tools}
To call one, write <tool_call>{{"name": NAME, "arguments": {{...}}}}</tool_call>."""


def describe_tools(tools: Iterable[Mapping[str, Any]], system: str = "") -> str:
    """Return a system message with a description of tools at its end."""
    section = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    return f"{system}\n\n{section}" if system else section


def write_call(call: ToolCall) -> str:
    name, arguments = call
    return f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {arguments}}}</tool_call>'


def read_calls(text: str) -> tuple[str, Sequence[ToolCall]] | None:
    """Return the text outside of calls, and the calls; None if a call is malformed."""
    calls = []
    for raw in _CALL.findall(text):
        try:
            call = json.loads(raw)
            name, arguments = call["name"], call.get("arguments") or {}
            serialized = json.dumps(arguments, sort_keys=True, ensure_ascii=False, allow_nan=False)
            (name + serialized).encode()  # half of a surrogate pair cannot be sent
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        if not isinstance(arguments, dict):
            return None
        calls.append((name, serialized))
    return (_CALL.sub("", text) if calls else text), calls
