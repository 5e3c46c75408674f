"""Request bodies: OpenAI's chat and text completions, with the extensions of vLLM and SGLang.

Unknown arguments are refused, as OpenAI does, because ignoring an option silently would change the answer.
Unsupported arguments of OpenAI's API are ignored if they cannot change an answer. Otherwise they are refused,
unless their value has no effect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    field_validator,
    model_validator,
)

from perilune.engine.request import SamplingParams
from perilune.serve.bodies import Body, Document, RequestBody, check_size, require_part_types
from perilune.serve.tool_formats import MAX_CALLS, ToolFormat
from perilune.servers import MAX_SERVER_TEMPERATURE

MAX_CHOICES = 256  # samples of one request
MAX_STOPS = 16
MAX_LOGPROBS = 20
DEFAULT_VOICE = "default"  # of a speech model
NO_EFFECT = frozenset(
    ("metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier")
) | {"service_tier", "store", "user"}
# Unsupported arguments, and the values that have no effect.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # Of vLLM:
    "chat_template": (),
    "documents": (),
    "echo": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "priority": (0,),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}

UNSUPPORTED_STRUCTURES: Mapping[str, tuple[Any, ...]] = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "disable_fallback": (False,),
    "whitespace_pattern": (),
}

MAX_MESSAGES = 10_000
MAX_TOOLS = 128
MAX_PATTERN_CHARS = 4096  # characters of a regular expression
MAX_GRAMMAR_CHARS = 1 << 14  # characters of a grammar
MAX_TAGS = 128
MAX_OPTIONS = 1024  # texts that an answer may be
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, StringConstraints(min_length=1)]


def encodable(text: str) -> str:
    """Return the text, as a validator; raise a UnicodeEncodeError if it has lone surrogates."""
    return text.encode().decode()


Unicode = Annotated[Text, AfterValidator(encodable)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=512)]  # each token is compared with all
ShortName = Annotated[str, StringConstraints(max_length=256)]
Word = Annotated[int, Field(ge=0, lt=2**32)]


Biases = Annotated[
    dict[Annotated[int, Field(ge=0, strict=False)], Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(check_size),
]


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = True  # ignored: controls only padding of the stream


class JsonSchema(Body):
    """A schema that answers must match."""

    name: str = "answer"
    description: str | None = None
    schema_: Document = Field(alias="schema")
    strict: bool | None = None  # answers always match


class TagStructure(Body):
    """JSON between two texts."""

    begin: Annotated[Unicode, StringConstraints(max_length=512)]
    schema_: Document = Field(alias="schema")
    end: Annotated[str, StringConstraints(max_length=512), AfterValidator(encodable)] = ""


class StructuralTag(Body):
    """Free text in which each trigger begins one of the structures, as in vLLM and SGLang."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[list[TagStructure], Field(min_length=1, max_length=MAX_TAGS, fail_fast=True)]
    triggers: Annotated[list[Unicode], Field(min_length=1, max_length=MAX_TAGS, fail_fast=True)]

    @model_validator(mode="after")
    def _has_triggers(self) -> StructuralTag:
        for structure in self.structures:
            if self.trigger(structure) is None:
                raise ValueError(f"no trigger begins {structure.begin!r}")
        return self

    def trigger(self, structure: TagStructure) -> str | None:
        """Return the trigger of a structure, with which it begins."""
        return next((trigger for trigger in self.triggers if structure.begin.startswith(trigger)), None)


class ResponseFormat(Body):
    """The format of answers."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema and type: json_schema must be given together")
        return self

    @property
    def schema_document(self) -> dict[str, Any] | None:
        """The JSON schema of answers, or None for text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class StructuredOutputs(RequestBody):
    """The constraint on answers, as in vLLM: exactly one of the arguments."""

    unsupported = UNSUPPORTED_STRUCTURES

    json_: Document | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: Annotated[Unicode, StringConstraints(max_length=MAX_PATTERN_CHARS)] | None = None
    choice: Annotated[list[Unicode], Field(min_length=1, max_length=MAX_OPTIONS, fail_fast=True)] | None = (
        None
    )
    grammar: Annotated[Unicode, StringConstraints(max_length=MAX_GRAMMAR_CHARS)] | None = None
    structural_tag: StructuralTag | None = None

    @field_validator("json_", "structural_tag", mode="before")
    @classmethod
    def _parsed(cls, schema: Any) -> Any:
        return json.loads(schema) if isinstance(schema, str) else schema

    @model_validator(mode="after")
    def _has_one(self) -> StructuredOutputs:
        if sum(value is not None for _, value in self) != 1:
            names = "json, json_object, regex, choice, grammar and structural_tag"
            raise ValueError(f"give exactly one of {names}")
        return self


class Sampling(RequestBody):
    """The arguments that chat and text completions share.

    Attributes:
        key: (seed, step, task), the counters of the random numbers, instead of `seed`.
        return_token_ids: also return token ids and the policy version of each token.
        ignore_eos: stop only at `stop` and `stop_token_ids`.
        returns_in: seconds until the conversation's next request is expected, for example because a tool is
            running. Its prefix stays in the cache longer.
    """

    unsupported = UNSUPPORTED
    no_effect = NO_EFFECT

    model: str
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(1.0, ge=0, le=MAX_SERVER_TEMPERATURE)
    top_p: float = Field(1.0, gt=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    logit_bias: Biases | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    min_tokens: int = Field(0, ge=0)
    stop_token_ids: Annotated[list[Token], Field(fail_fast=True)] = Field(
        default_factory=list, max_length=1024
    )
    ignore_eos: bool = False
    key: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**64)], Word, Word], Field(strict=False)] | None = (
        None
    )
    return_token_ids: bool = False
    returns_in: float = Field(0.0, ge=0, le=3600)

    @model_validator(mode="after")
    def _consistent(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.key is not None and self.seed is not None:
            raise ValueError("key and seed both select the random numbers; give only one")
        if self.structured_outputs is not None and self.response_format is not None:
            raise ValueError(
                "structured_outputs and response_format both constrain the answer; give only one"
            )
        return self

    @property
    def is_constrained(self) -> bool:
        """True if a grammar constrains the answer."""
        return self.structured_outputs is not None or self.schema_document is not None

    @property
    def schema_document(self) -> dict[str, Any] | None:
        """The JSON schema of the answer, or None."""
        if self.structured_outputs is not None:
            return (
                {"type": "object"} if self.structured_outputs.json_object else self.structured_outputs.json_
            )
        return None if self.response_format is None else self.response_format.schema_document

    @property
    def random_key(self) -> tuple[int, int, int] | None:
        """The counters of the random numbers, or None."""
        if self.key is not None:
            return self.key
        return None if self.seed is None else (self.seed % 2**64, 0, 0)

    def params(self, max_tokens: int, end_tokens: tuple[int, ...], top_logprobs: int) -> SamplingParams:
        """Return the sampling parameters for the engine.

        Args:
            end_tokens: tokens that end an answer of the model, unless `ignore_eos`.
        """
        ends = () if self.ignore_eos else end_tokens
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            stop_token_ids=tuple(dict.fromkeys((*ends, *self.stop_token_ids))),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            min_tokens=self.min_tokens,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias or {},
            top_logprobs=top_logprobs,
        )


class CompletionBody(Sampling):
    """POST /v1/completions.

    Attributes:
        echo: put the prompt before each choice, with the log-probs of its tokens if `logprobs` is given.
    """

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
    )
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False

    @model_validator(mode="after")
    def _echoes_whole(self) -> CompletionBody:
        if self.echo and self.stream:
            raise ValueError("echo needs stream: false")
        if not self.max_tokens and not self.echo:
            raise ValueError("max_tokens: 0 needs echo: true")
        return self

    @property
    def num_choices(self) -> int:
        """Number of samples for all prompts."""
        return self.n * len(self.prompts)

    @property
    def max_answer_tokens(self) -> int:
        return self.max_tokens

    @property
    def top_logprobs(self) -> int:
        return self.logprobs or 0

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as texts or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    description: str | None = None
    parameters: Document = Field(default_factory=dict)
    strict: bool | None = None  # only `tool_choice` constrains arguments


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function

    @property
    def document(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class CalledFunction(RequestBody):
    """The function of a call, and its arguments as JSON."""

    no_effect = frozenset({"parsed_arguments"})

    name: str
    arguments: str


class CalledTool(Body):
    """A call in a message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    @property
    def document(self) -> dict[str, Any]:
        """The call as chat templates expect it. Arguments that are a JSON object are parsed."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        parsed = arguments if isinstance(arguments, dict) else self.function.arguments
        return {
            "id": self.id,
            "type": self.type,
            "function": {"name": self.function.name, "arguments": parsed},
        }


class Message(RequestBody):
    """One message of a conversation. Earlier reasoning is left out of the prompt."""

    no_effect = frozenset(("annotations", "parsed", "reasoning", "reasoning_content", "refusal"))

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: Annotated[
        str | Annotated[list[TextPart], Field(fail_fast=True)] | None, require_part_types("text")
    ] = None
    name: str | None = None
    tool_calls: Annotated[list[CalledTool], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)

    @property
    def characters(self) -> int:
        calls = [call.function for call in self.tool_calls or ()]
        return len(self.role) + len(self.text) + sum(len(call.name) + len(call.arguments) for call in calls)

    def document(self, calls_as_text: ToolFormat | None) -> dict[str, Any]:
        """Return the message as chat templates expect it; `calls_as_text` is the format for calls as text."""
        named = {"name": self.name} if self.name else {}
        if calls_as_text is not None:
            calls = [(call.function.name, call.function.arguments) for call in self.tool_calls or ()]
            written = calls_as_text.format_calls(calls) if calls else ""
            return {"role": self.role, "content": "\n".join(filter(None, [self.text, written])), **named}
        called = {"tool_calls": [call.document for call in self.tool_calls]} if self.tool_calls else {}
        of_call = {"tool_call_id": self.tool_call_id} if self.tool_call_id else {}
        return {"role": self.role, "content": self.text, **named, **called, **of_call}


class PromptOptions(Body):
    """Options for rendering a conversation as a prompt.

    Attributes:
        tools: functions that the model may call.
        chat_template_kwargs: further variables of the chat template, such as {"enable_thinking": false}.
        reasoning_effort: a variable of the chat template, which also sets `enable_thinking`, as in vLLM.
        add_generation_prompt: whether the prompt ends with the beginning of the assistant's turn.
        continue_final_message: whether the last message stays open, so that the answer continues it.
    """

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    chat_template_kwargs: Document = Field(default_factory=dict)
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _prompt_is_consistent(self) -> PromptOptions:
        variables = self.chat_template_kwargs
        for name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
            if name in variables:
                raise ValueError(f"chat_template_kwargs cannot contain {name}")
        effort = self.reasoning_effort
        if effort is not None and variables.get("reasoning_effort", effort) != effort:
            raise ValueError("reasoning_effort and chat_template_kwargs contradict each other")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt: false")
        return self

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of the chat template, without messages and tools."""
        effort = self.reasoning_effort
        thinking = {} if effort is None else {"enable_thinking": effort != "none", "reasoning_effort": effort}
        prompt = {"add_generation_prompt": self.add_generation_prompt}
        return {**thinking, **self.chat_template_kwargs, **prompt}


class DetokenizeBody(Body):
    """POST /detokenize, as in vLLM."""

    model: str | None = None
    tokens: Annotated[list[Token], Field(fail_fast=True)]


class _NamedFunction(Body):
    name: str


class _NamedTool(Body):
    type: Literal["function"]
    function: _NamedFunction


class _AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class _AllowedToolsChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


def _kind_of_choice(choice: Any) -> str:
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", "mode")
    return kind if kind in ("mode", "allowed_tools") else "function"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[_NamedTool, Tag("function")]
    | Annotated[_AllowedToolsChoice, Tag("allowed_tools")],
    Discriminator(_kind_of_choice),
]


class ChatBody(PromptOptions, Sampling):
    """POST /v1/chat/completions.

    Attributes:
        max_completion_tokens: newer name of `max_tokens`. Default: as many as fit into the context.
        tools: functions that the model may call. A choice that calls functions has `tool_calls`.
        tool_choice: with "none", the model is not shown the tools and calls in its answer are not parsed.
            "required" or a named function constrains the answer to calls. "allowed_tools" shows the model
            only some of the tools.
    """

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True

    @property
    def usable_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is shown."""
        tools = self.tools if self.names_function else self._callable
        return [tool.document for tool in tools]

    @property
    def forced_functions(self) -> list[Function]:
        """The functions of which the model must call at least one; empty if it need not call any."""
        choice = self.tool_choice
        mode = choice.allowed_tools.mode if isinstance(choice, _AllowedToolsChoice) else choice
        return [tool.function for tool in self._callable] if self.names_function or mode == "required" else []

    @property
    def _callable(self) -> list[Tool]:
        if isinstance(self.tool_choice, str):
            return [] if self.tool_choice == "none" else self.tools
        return [tool for tool in self.tools if tool.function.name in self._named]

    @property
    def _named(self) -> set[str]:
        """The functions that `tool_choice` names."""
        if isinstance(self.tool_choice, str):
            return set()
        choice = self.tool_choice
        tools = [choice] if isinstance(choice, _NamedTool) else choice.allowed_tools.tools
        return {tool.function.name for tool in tools}

    @property
    def is_constrained(self) -> bool:
        """True if a grammar constrains the answer."""
        return bool(self.forced_functions) or super().is_constrained

    @property
    def num_choices(self) -> int:
        """Number of samples."""
        return self.n

    @property
    def names_function(self) -> bool:
        """True if `tool_choice` names a function."""
        return isinstance(self.tool_choice, _NamedTool)

    @property
    def max_calls(self) -> int:
        """Maximum number of calls in an answer."""
        return MAX_CALLS if self.parallel_tool_calls and not self.names_function else 1

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self._named - {tool.function.name for tool in self.tools} or (
            self.tool_choice == "required" and not self.tools
        ):
            raise ValueError("tool_choice needs a function in tools that it may call")
        if self.forced_functions and super().is_constrained:
            field = "response_format" if self.structured_outputs is None else "structured_outputs"
            raise ValueError(f"tool_choice and {field} both constrain the answer; give only one")
        return self

    @property
    def max_answer_tokens(self) -> int | None:
        """The maximum number of tokens, given under either name; None if neither is given."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


AnswerBody = ChatBody | CompletionBody


class TokenizeBody(PromptOptions, RequestBody):
    """POST /tokenize, as in vLLM: tokens of a prompt, or of a conversation as a chat would send it.

    Attributes:
        add_special_tokens: whether a prompt begins with BOS if the tokenizer adds it. Chat templates decide
            this for themselves.
    """

    unsupported = {"return_token_strs": (False,)}  # noqa: RUF012 - a class variable of RequestBody

    add_special_tokens: bool | None = None
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None

    @model_validator(mode="after")
    def _has_one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens needs prompt")
        return self


class SpeechBody(Body):
    """The body of POST /v1/audio/speech: OpenAI's arguments, and those of Qwen3-TTS and this server.

    Attributes:
        non_streaming_mode: feed the whole text before the first frame, instead of one token per frame.
    """

    model: str
    input: Text
    voice: ShortName = DEFAULT_VOICE
    instructions: str = ""
    response_format: Literal["wav", "pcm"] = "wav"
    speed: Annotated[float, Field(ge=1, le=1)] = 1  # no other speed is implemented
    stream_format: Literal["audio"] = "audio"
    language: ShortName = "auto"
    non_streaming_mode: bool = True
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stream: bool = True
