"""Convert conversations from and to OpenAI's messages and ShareGPT's conversations.

In a record a tool call is text at the end of the assistant's message, as in the chat templates of Hermes and
Qwen:

<tool_call>
{"name": "add", "arguments": {"a": 1, "b": 2}}
</tool_call>

Converting back gives the original conversation. Text that only resembles a call stays text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from perilune.errors import RequestError

Message = dict[str, Any]

_CALLS = re.compile(
    r"(?P<said>.*?)(?P<calls>(?:^|\n)<tool_call>\n[^\n]*\n</tool_call>(?:\n<tool_call>\n[^\n]*\n</tool_call>)*)\Z",
    re.DOTALL,
)
_CALL = re.compile(r"<tool_call>\n([^\n]*)\n</tool_call>")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_ROLES_BY_SHAREGPT_NAME = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
_SHAREGPT_NAMES = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}


def to_openai(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's format, with numbered `tool_calls` and results with the ids of their calls.

    A result without a call, as from an environment with its own action syntax, has no id.
    """
    converted: list[dict[str, Any]] = []
    pending: list[str] = []
    count = 0
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            identity = {"tool_call_id": pending.pop(0)} if pending else {}
            converted.append({"role": role, **identity, "content": content})
            continue
        text, calls = _split_calls(content) if role == "assistant" else (content, [])
        pending = [f"call_{count + index}" for index in range(len(calls))]
        count += len(calls)
        if not calls:
            converted.append({"role": role, "content": content, **_unlearned(message, role)})
            continue
        written = [
            {"id": name, "type": "function", "function": {**call, "arguments": _dump_json(call["arguments"])}}
            for name, call in zip(pending, calls, strict=True)
        ]
        row = {"role": role, "content": text or None, "tool_calls": written}
        converted.append({**row, **_unlearned(message, role)})
    return converted


def from_openai(messages: Any) -> list[Message]:
    """Return messages from OpenAI's format, with calls as text and results in the order of their calls.

    Raises:
        RequestError: for malformed messages and for content that a record cannot hold: pictures, calls
            without a result before calls with one, arguments that are not a JSON object, results without a
            call.
    """
    converted: list[Message] = []
    pending: dict[str, str | None] = {}  # results by the call's id, until all are there
    for index, message in enumerate(_check_list(messages, "messages")):
        where = f"messages[{index}]"
        _require(isinstance(message, dict), f"{where} is not a message")
        role = ROLES.get(str(message.get("role")))
        _require(role is not None, f"{where} has the role {message.get('role')!r}")
        allowed = {"role", "content"} | {
            "assistant": {"tool_calls", "weight"},
            "tool": {"tool_call_id", "name"},
        }.get(str(role), set())
        more = [key for key, value in message.items() if key not in allowed and value]
        _require(not more, f"{where} has {', '.join(more)}, which a record cannot hold")
        content = read_content(message.get("content"), where)
        if role == "tool" and message.get("tool_call_id"):
            name = str(message["tool_call_id"])
            _require(name in pending and pending[name] is None, f"{where} answers no open call")
            pending[name] = content
            continue
        converted += _ordered_results(pending, where)
        pending = {}
        calls = (
            _check_list(message.get("tool_calls") or [], f"{where}.tool_calls") if role == "assistant" else []
        )
        written = [_convert_call(call, where) for call in calls]
        pending = dict.fromkeys(str(call.get("id") or f"call {number}") for number, call in enumerate(calls))
        _require(len(pending) == len(calls), f"{where} has two calls with the same id")
        row = {"role": str(role), "content": _join_calls(content, written)}
        converted.append({**row, **_unlearned(message, role)})
    return converted + _ordered_results(pending, "the end")


def to_sharegpt(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return turns in ShareGPT's format: `from` (system, human, gpt or tool) and `value`. Calls stay text."""
    return [
        {
            "from": _SHAREGPT_NAMES[message["role"]],
            "value": message["content"],
            **_unlearned(message, message["role"]),
        }
        for message in messages
    ]


def from_sharegpt(conversations: Any) -> list[Message]:
    """Return messages from ShareGPT's format, including LLaMA-Factory's `function_call` and `observation`.

    Raises:
        RequestError: for a turn that is malformed or has an unknown `from`.
    """
    converted: list[Message] = []
    for index, turn in enumerate(_check_list(conversations, "conversations")):
        where = f"conversations[{index}]"
        _require(
            isinstance(turn, dict) and isinstance(turn.get("value"), str),
            f"{where} is not a turn with a value",
        )
        if turn.get("from") == "function_call":
            call = _parse_object(turn["value"], where)
            content = _join_calls("", [_render_call(call, where)])
            converted.append({"role": "assistant", "content": content, **_unlearned(turn, "assistant")})
            continue
        role = _ROLES_BY_SHAREGPT_NAME.get(str(turn.get("from")))
        _require(role is not None, f"{where} is from {turn.get('from')!r}")
        converted.append({"role": str(role), "content": turn["value"], **_unlearned(turn, role)})
    return converted


def _unlearned(message: Mapping[str, Any], role: str | None) -> dict[str, int]:
    """Return {"weight": 0} for a message of the assistant that is not learned, {} for other messages."""
    weight = message.get("weight")
    _require(role != "assistant" or weight in (None, 0, 1), "a message has a weight other than 0 and 1")
    return {"weight": 0} if role == "assistant" and weight == 0 else {}


def _split_calls(content: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the text and the tool calls after it; only calls in the form of `_join_calls` count."""
    parts = _CALLS.fullmatch(content)
    if parts is None:
        return content, []
    try:
        calls = [json.loads(body) for body in _CALL.findall(parts["calls"])]
        rewritten = _join_calls(parts["said"], [_render_call(call, "") for call in calls])
    except (ValueError, RequestError, RecursionError):
        return content, []
    return (parts["said"], calls) if rewritten == content else (content, [])


def _join_calls(said: str, blocks: Sequence[str]) -> str:
    return "\n".join([*([said] if said or not blocks else []), *blocks])


def _render_call(call: Any, where: str) -> str:
    valid = isinstance(call, dict) and set(call) == {"name", "arguments"} and isinstance(call["name"], str)
    _require(valid and isinstance(call["arguments"], dict), f"{where} is not a call with name and arguments")
    return f"<tool_call>\n{_dump_json({'name': call['name'], 'arguments': call['arguments']})}\n</tool_call>"


def _convert_call(call: Any, where: str) -> str:
    _require(
        isinstance(call, dict)
        and isinstance(call.get("function"), dict)
        and call.get("type", "function") == "function",
        f"{where} has a call that is not of a function",
    )
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parse_object(arguments, where)
    return _render_call({"name": function.get("name"), "arguments": arguments}, where)


def _ordered_results(pending: Mapping[str, str | None], where: str) -> list[Message]:
    """Return results in the order of their calls. A call with a result must not follow one without."""
    contents = list(pending.values())
    results = [content for content in contents if content is not None]
    _require(contents[: len(results)] == results, f"before {where} a call has no result and a later one has")
    return [{"role": "tool", "content": content} for content in results]


def read_content(content: Any, where: str) -> str:
    """Return the content of a message as text: None is empty, and a list of text parts is joined.

    Raises:
        RequestError: for content that is not text, such as pictures.
    """
    if content is None:
        return ""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        _require(all(isinstance(part, str) for part in parts), f"{where} has content that is not text")
        return "".join(map(str, parts))
    _require(isinstance(content, str), f"{where} has content that is not text")
    return str(content)


def _parse_object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    _require(isinstance(value, dict), f"{where} has arguments that are not a JSON object")
    return dict(value)


def _dump_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _check_list(value: Any, name: str) -> list[Any]:
    _require(isinstance(value, list), f"{name} is not a list")
    return list(value)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise RequestError(what)
