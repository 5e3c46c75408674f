"""Conversations to and from the forms that others keep them in: OpenAI's messages, ShareGPT's conversations.

In a record a call of a tool is text, at the end of what the assistant says, as the chat templates of Hermes
and Qwen write it:

<tool_call>
{"name": "add", "arguments": {"a": 1, "b": 2}}
</tool_call>

What is converted and converted back is the same again. Text that only resembles a call stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from perilune.errors import RequestError

Message = dict[str, str]

_CALLS = re.compile(
    r"(?P<said>.*?)(?P<calls>(?:^|\n)<tool_call>\n[^\n]*\n</tool_call>(?:\n<tool_call>\n[^\n]*\n</tool_call>)*)\Z",
    re.DOTALL,
)
_CALL = re.compile(r"<tool_call>\n([^\n]*)\n</tool_call>")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FROM = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "model": "assistant", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
_SHAREGPT = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}


def to_openai(messages: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """As OpenAI's chat completions have them: calls in `tool_calls`, numbered, and results with their ids.

    A result that answers no call, as of an environment that has actions in a language of its own, has no id.
    """
    found: list[dict[str, Any]] = []
    pending: list[str] = []
    count = 0
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            identity = {"tool_call_id": pending.pop(0)} if pending else {}
            found.append({"role": role, **identity, "content": content})
            continue
        said, calls = _split(content) if role == "assistant" else (content, [])
        pending = [f"call_{count + place}" for place in range(len(calls))]
        count += len(calls)
        if not calls:
            found.append({"role": role, "content": content})
            continue
        written = [
            {"id": name, "type": "function", "function": {**call, "arguments": _json(call["arguments"])}}
            for name, call in zip(pending, calls, strict=True)
        ]
        found.append({"role": role, "content": said or None, "tool_calls": written})
    return found


def from_openai(messages: Any) -> list[Message]:
    """Messages of OpenAI's form, with calls as text and results in the order of their calls.

    Raises:
        RequestError: for what text cannot say: pictures, calls without a result among others that have one,
            arguments that are no JSON object, results of no call; or what is malformed.
    """
    found: list[Message] = []
    pending: dict[str, str | None] = {}  # results by the call's id, until all are there
    for index, message in enumerate(_list(messages, "messages")):
        where = f"messages[{index}]"
        _require(isinstance(message, dict), f"{where} is no message")
        role = _ROLES.get(str(message.get("role")))
        _require(role is not None, f"{where} has the role {message.get('role')!r}")
        own = {"role", "content"} | {"assistant": {"tool_calls"}, "tool": {"tool_call_id", "name"}}.get(
            str(role), set()
        )
        more = [key for key, value in message.items() if key not in own and value]
        _require(not more, f"{where} has {', '.join(more)}, which a record cannot hold")
        content = _text(message.get("content"), where)
        if role == "tool" and message.get("tool_call_id"):
            name = str(message["tool_call_id"])
            _require(name in pending and pending[name] is None, f"{where} answers no call that is open")
            pending[name] = content
            continue
        found += _results(pending, where)
        pending = {}
        calls = _list(message.get("tool_calls") or [], f"{where}.tool_calls") if role == "assistant" else []
        written = [_called(call, where) for call in calls]
        pending = dict.fromkeys(str(call.get("id")) for call in calls)
        _require(len(pending) == len(calls), f"{where} has two calls of one id")
        found.append({"role": str(role), "content": _joined(content, written)})
    return found + _results(pending, "the end")


def to_sharegpt(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """As ShareGPT has them: from `system`, `human`, `gpt` or `tool`, a `value`; calls stay text."""
    return [{"from": _SHAREGPT[message["role"]], "value": message["content"]} for message in messages]


def from_sharegpt(conversations: Any) -> list[Message]:
    """Messages of ShareGPT's form, LLaMA-Factory's `function_call` and `observation` among them.

    Raises:
        RequestError: for a turn that is malformed or from somebody unknown.
    """
    found: list[Message] = []
    for index, turn in enumerate(_list(conversations, "conversations")):
        where = f"conversations[{index}]"
        _require(
            isinstance(turn, dict) and isinstance(turn.get("value"), str), f"{where} is no turn with a value"
        )
        if turn.get("from") == "function_call":
            call = _object(turn["value"], where)
            found.append({"role": "assistant", "content": _joined("", [_block(call, where)])})
            continue
        _require(turn.get("from") in _FROM, f"{where} is from {turn.get('from')!r}")
        found.append({"role": _FROM[turn["from"]], "content": turn["value"]})
    return found


def _split(content: str) -> tuple[str, list[dict[str, Any]]]:
    """What is said, and the calls after it; none where they are not written as `_joined` writes them."""
    parts = _CALLS.fullmatch(content)
    if parts is None:
        return content, []
    try:
        calls = [json.loads(body) for body in _CALL.findall(parts["calls"])]
        rewritten = _joined(parts["said"], [_block(call, "") for call in calls])
    except (ValueError, RequestError, RecursionError):
        return content, []
    return (parts["said"], calls) if rewritten == content else (content, [])


def _joined(said: str, blocks: Sequence[str]) -> str:
    return "\n".join([*([said] if said or not blocks else []), *blocks])


def _block(call: Any, where: str) -> str:
    """A call as text.

    Raises:
        RequestError: when it is none.
    """
    fine = isinstance(call, dict) and set(call) == {"name", "arguments"} and isinstance(call["name"], str)
    _require(fine and isinstance(call["arguments"], dict), f"{where} is no call with name and arguments")
    return f"<tool_call>\n{_json({'name': call['name'], 'arguments': call['arguments']})}\n</tool_call>"


def _called(call: Any, where: str) -> str:
    _require(
        isinstance(call, dict)
        and isinstance(call.get("function"), dict)
        and call.get("type", "function") == "function",
        f"{where} has a call of no function",
    )
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _object(arguments, where)
    return _block({"name": function.get("name"), "arguments": arguments}, where)


def _results(pending: Mapping[str, str | None], where: str) -> list[Message]:
    """Results in the order of their calls; if any is there, then those of all calls before it."""
    contents = list(pending.values())
    given = [content for content in contents if content is not None]
    _require(contents[: len(given)] == given, f"before {where} a call has no result and a later one has")
    return [{"role": "tool", "content": content} for content in given]


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        _require(all(isinstance(part, str) for part in parts), f"{where} has content that is not text")
        return "".join(map(str, parts))
    _require(isinstance(content, str), f"{where} has content that is not text")
    return str(content)


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    _require(isinstance(found, dict), f"{where} has arguments that are no JSON object")
    return dict(found)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _list(value: Any, name: str) -> list[Any]:
    _require(isinstance(value, list), f"{name} is no list")
    return list(value)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise RequestError(what)
