"""OpenAI's chat completions, as far as agent programs need them: requests to messages, turns to responses.

Sampling settings of a request are ignored, because a policy is trained with those of its recipe. Other
settings that would change the text of an answer are refused. The system message describes the tools, and
their calls are read from the text.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from perilune.data.tool_calls import ToolCall, describe_tools, read_calls, write_call

MAX_BODY_BYTES = 4 << 20  # bytes of a request
_IGNORED = """
frequency_penalty logit_bias max_completion_tokens max_tokens metadata min_p model parallel_tool_calls
presence_penalty prompt_cache_key reasoning_effort repetition_penalty safety_identifier seed service_tier
store temperature top_k top_p user verbosity
"""
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "function_call": ("none",),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
}
_ACCEPTED = frozenset(_IGNORED.split()) | {"messages", "stop", "stream", "stream_options", "tools"}
_ROLES = {"developer": "system", "function": "tool"} | {
    role: role for role in ("system", "user", "assistant", "tool")
}


class RefusedCallError(Exception):
    """A request that the gateway refuses with status 400."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message. White space around the content makes no difference between two messages.

    Attributes:
        stripped: the content without it.
    """

    role: str
    content: str = field(compare=False)
    tool_calls: tuple[ToolCall, ...] = ()
    stripped: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stripped", self.content.strip())

    def to_text(self) -> dict[str, str]:
        calls = map(write_call, self.tool_calls)
        return {"role": self.role, "content": "\n".join(filter(None, [self.content, *calls]))}


@dataclass(frozen=True)
class ChatRequest:
    """A request to complete a conversation.

    Attributes:
        tools: whether the answer may call tools.
        stop: texts at which the answer shall end.
    """

    messages: tuple[ChatMessage, ...]
    tools: bool
    stop: tuple[str, ...]
    stream: bool
    usage: bool


def read_request(body: bytes) -> ChatRequest:
    """Parse a request.

    Raises:
        RefusedCallError: when it is malformed, or asks for an unsupported feature.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise RefusedCallError("the body is not JSON") from None
    if not isinstance(document, dict):
        raise RefusedCallError("the body is not an object")
    for name, value in document.items():
        if value is None or name in _ACCEPTED:
            continue
        if name not in _WITHOUT_EFFECT or not any(value == allowed for allowed in _WITHOUT_EFFECT[name]):
            raise RefusedCallError(f"{name}: {str(value)[:100]} is not supported while a model is trained")
    try:
        messages = [_parse_message(message) for message in document["messages"]]
        tools = [tool["function"] for tool in document.get("tools") or ()]
        stop = document.get("stop") or ()
        options = document.get("stream_options") or {}
        if not messages or messages[-1].role == "assistant":
            raise RefusedCallError("messages must end with a message to answer")
        return ChatRequest(
            tuple(_add_tools(messages, tools)),
            bool(tools) and document.get("tool_choice") != "none",
            (stop,) if isinstance(stop, str) else tuple(map(str, stop)),
            bool(document.get("stream")),
            bool(options.get("include_usage")),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RefusedCallError(f"messages, tools or stop are malformed: {error!r}") from None


def _parse_message(message: Mapping[str, Any]) -> ChatMessage:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    calls = [
        (str(call["function"]["name"]), _canonical_arguments(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return ChatMessage(_ROLES[message["role"]], content, tuple(calls))


def _canonical_arguments(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, ensure_ascii=False)
    except ValueError:
        return json.dumps(arguments)


def _add_tools(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> Iterator[ChatMessage]:
    """Yield the conversation, with the tools described at the end of its system message."""
    first, rest = (messages[0].content, messages[1:]) if messages[0].role == "system" else ("", messages)
    system = describe_tools(tools, first) if tools else first
    if system:
        yield ChatMessage("system", system)
    yield from rest


@dataclass(frozen=True)
class ChatAnswer:
    """A turn of the policy as an answer to a request.

    Attributes:
        number: of the answer in its session. Identifiers follow from it, so that they are always the same.
        text: without the stop text that ended it.
    """

    request: ChatRequest
    number: int
    text: str

    @cached_property
    def _parts(self) -> tuple[str, Sequence[ToolCall]]:
        """The text outside of tool calls, and the calls. A text with a malformed call stays as it is."""
        return (read_calls(self.text) if self.request.tools else None) or (self.text, ())

    @property
    def message(self) -> ChatMessage:
        """The answer as the program will repeat it."""
        content, calls = self._parts
        return ChatMessage("assistant", content, tuple(calls))

    def document(self) -> bytes:
        message = {"role": "assistant", **self._message(), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._reason}
        return _encode({**self._header("chat.completion"), "choices": [choice], "usage": _USAGE})

    def events(self) -> bytes:
        """Return the response as a stream of events."""
        pieces = [({"role": "assistant", **self._message(streamed=True)}, None), ({}, self._reason)]
        head = self._header("chat.completion.chunk")
        documents: list[dict[str, Any]] = [
            {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}
            for delta, reason in pieces
        ]
        if self.request.usage:
            documents.append({**head, "choices": [], "usage": _USAGE})
        return b"".join(b"data: " + event + b"\n\n" for event in [*map(_encode, documents), b"[DONE]"])

    @property
    def _reason(self) -> str:
        return "tool_calls" if self._parts[1] else "stop"

    def _header(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.number}", "object": kind, "created": 0, "model": "policy"}

    def _message(self, *, streamed: bool = False) -> dict[str, Any]:
        content, calls = self._parts
        if not calls:
            return {"content": content}
        tool_calls = [
            {
                **({"index": index} if streamed else {}),
                "id": f"call_{self.number}_{index}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
        return {"content": content or None, "tool_calls": tool_calls}


_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}  # the gateway does not count tokens


def _encode(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode()


def error_document(message: str) -> bytes:
    """Return the body of a refusal."""
    return _encode({"error": {"message": message, "type": "invalid_request_error", "code": None}})
