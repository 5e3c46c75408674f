"""The body of POST /v1/responses, and its conversion to a chat request.

An input item becomes a message, or a call in the preceding message of the assistant. Earlier reasoning is not
part of the prompt, as in a chat.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, Tag
from pydantic import Discriminator as ByFunction

from perilune.serve.bodies import Body, Document, Repeatable, RequestBody, require_part_types, validate_body
from perilune.serve.schema import MAX_LOGPROBS, MAX_MESSAGES, MAX_TOOLS, ChatBody, Effort, encodable

Status = Literal["in_progress", "completed", "incomplete"]
_Echoed = Annotated[str, AfterValidator(encodable)]  # a response repeats it
_Id = Annotated[str, StringConstraints(min_length=1, max_length=256)]

# Arguments that mean the same in a chat.
FORWARDED = (
    frozenset(
        ("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "key", "stop", "stop_token_ids")
    )
    | {"repetition_penalty", "min_tokens", "ignore_eos", "returns_in", "chat_template_kwargs"}
    | {"parallel_tool_calls"}
)
_NO_EFFECT = frozenset(("prompt_cache_key", "prompt_cache_retention", "safety_identifier")) | {
    "service_tier",
    "user",
}
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "max_tool_calls": (),
    "prompt": (),
    "truncation": ("disabled",),
}


class _TextPart(RequestBody):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] | None = None


_Content = Annotated[
    str | Annotated[list[_TextPart], Field(fail_fast=True)], require_part_types("input_text", "output_text")
]


class _MessageItem(RequestBody):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content
    id: _Id | None = None
    status: Status | None = None
    phase: str | None = None


class _CallItem(RequestBody):
    type: Literal["function_call"]
    call_id: _Id
    name: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    arguments: str
    id: _Id | None = None
    status: Status | None = None


class _ResultItem(RequestBody):
    type: Literal["function_call_output"]
    call_id: _Id
    output: _Content
    id: _Id | None = None
    status: Status | None = None


class _ReasoningItem(RequestBody):
    type: Literal["reasoning"]
    id: _Id | None = None
    summary: Annotated[list[Any], Field(max_length=1024)] = Field(default_factory=list)
    content: Annotated[list[Any], Field(max_length=1024)] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


def _type_of(item: Any) -> str | None:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


_Item = Annotated[
    Annotated[_MessageItem, Tag("message")]
    | Annotated[_CallItem, Tag("function_call")]
    | Annotated[_ResultItem, Tag("function_call_output")]
    | Annotated[_ReasoningItem, Tag("reasoning")],
    ByFunction(
        _type_of,
        custom_error_type="item",
        custom_error_message="an item is a message, a function_call, a function_call_output or reasoning",
    ),
]


class _Function(Body):
    type: Literal["function"]
    name: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    description: _Echoed | None = None
    parameters: Repeatable | None = None
    strict: bool | None = None  # only `tool_choice` constrains arguments


def _limit_entries(entries: Any) -> Any:
    """Return a mapping with few entries, before each of them is validated."""
    if isinstance(entries, dict) and len(entries) > 16:
        raise ValueError("has more than 16 entries")
    return entries


_Metadata = Annotated[
    dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
    BeforeValidator(_limit_entries),
]
"""The limits are those of OpenAI. The metadata is kept and repeated with each response."""


class _Format(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: _Echoed = "answer"
    description: _Echoed | None = None
    schema_: Repeatable | None = Field(None, alias="schema")
    strict: bool | None = None


class _Text(RequestBody):
    unsupported = {"verbosity": ("medium",)}  # noqa: RUF012 - a class variable of RequestBody

    format: _Format | None = None


class _Reasoning(Body):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # reasoning is returned as it is


class ResponseBody(RequestBody):
    """POST /v1/responses.

    Attributes:
        previous_response_id: a stored response, whose conversation this one continues without its
            instructions.
        store: whether a later request may continue this one.
    """

    unsupported = _UNSUPPORTED
    no_effect = _NO_EFFECT

    model: str
    input: Annotated[
        list[_Item],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(
            lambda value: [{"role": "user", "content": value}] if isinstance(value, str) else value
        ),
    ]
    instructions: _Echoed | None = None
    previous_response_id: _Id | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    store: bool = True
    stream: bool = False
    stream_options: Document = Field(default_factory=dict)  # ignored: controls only padding of the stream
    tools: Annotated[list[_Function], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list
    )
    text: _Text = _Text()
    reasoning: _Reasoning = _Reasoning()
    include: Annotated[
        list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], Field(fail_fast=True)
    ] = Field(default_factory=list)
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    metadata: _Metadata = Field(default_factory=dict)
    parallel_tool_calls: bool = True

    temperature: Any = None
    top_p: Any = None
    tool_choice: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    key: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    repetition_penalty: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    returns_in: Any = None
    chat_template_kwargs: Any = None

    @property
    def logprobs(self) -> bool:
        """True if log-probs are requested."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in self.include

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The input as messages of a chat, without the instructions."""
        messages: list[dict[str, Any]] = []
        for item in self.input:
            add_item(messages, item.model_dump(exclude_none=True))
        return messages

    @property
    def _chat_tool_choice(self) -> Any:
        choice = self.tool_choice
        if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
            return _nest_tool_choice(choice)
        fields = {key: value for key, value in choice.items() if key != "type"}
        if isinstance(tools := fields.get("tools"), list):
            fields["tools"] = [_nest_tool_choice(tool) for tool in tools]
        return {"type": "allowed_tools", "allowed_tools": fields}

    def chat(self, messages: Sequence[dict[str, Any]]) -> ChatBody:
        """Return the same request as a chat about `messages`.

        Raises:
            ApiError: 400, when an argument is invalid.
        """
        items = list(messages)
        if self.instructions:
            first = items.pop(0)["content"] if items and items[0]["role"] == "system" else ""
            system = "\n\n".join(filter(None, [self.instructions, first]))
            items.insert(0, {"role": "system", "content": system})
        document = {name: getattr(self, name) for name in FORWARDED} | {
            "messages": items,
            "tools": [
                {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
                for tool in self.tools
            ],
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs,
            "tool_choice": self._chat_tool_choice,
            "reasoning_effort": self.reasoning.effort,
        }
        form = self.text.format
        if form is not None:
            schema = form.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
            document["response_format"] = {"type": form.type} | (
                {"json_schema": schema} if form.type == "json_schema" else {}
            )
        return validate_body(document, ChatBody)


def _nest_tool_choice(tool: Any) -> Any:
    """Return the reference to a tool in the form of chat completions, with the name in an object."""
    if not isinstance(tool, dict):
        return tool
    return {"type": tool.get("type"), "function": {key: tool[key] for key in tool if key != "type"}}


def add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Add an input or output item to the messages of a chat."""
    if item["type"] == "message":
        role = "system" if item["role"] == "developer" else item["role"]
        messages.append({"role": role, "content": _join_text(item["content"])})
    elif item["type"] == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        last = messages[-1]
        messages[-1] = last | {"tool_calls": [*last.get("tool_calls", []), call]}
    elif item["type"] == "function_call_output":
        content = _join_text(item["output"])
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})


def _join_text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
