"""The formats in which models write tool calls, and their parsers for streamed text.

    hermes        <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>     Hermes, Qwen
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]              Mistral up to version 7
                  [TOOL_CALLS]f[ARGS]{"a": 1}                                     Mistral from version 11
    llama3_json   {"name": "f", "parameters": {"a": 1}}                           Llama 3.1 to 3.3
    pythonic      [f(a=1), g(b="x")]                                              Llama 3.2 and 4
    qwen3_coder   <tool_call><function=f><parameter=a>1</parameter></function>    Qwen3-Coder, Qwen3.5
                  </tool_call>
    glm45         <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>        GLM 4.5
                  </tool_call>
    deepseek_v3   <｜tool▁call▁begin｜>function<｜tool▁sep｜>f ```json {"a": 1}```  DeepSeek-V3, DeepSeek-R1
    deepseek_v31  <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>     DeepSeek-V3.1
    kimi_k2       <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>    Kimi K2
                  {"a": 1}<|tool_call_end|>
    openai        <|channel|>commentary to=functions.f <|constrain|>json          gpt-oss
                  <|message|>{"a": 1}<|call|>

The names are those of vLLM's tool parsers. In `deepseek_v3`, `deepseek_v31` and `kimi_k2`, another pair of
marks surrounds all calls of an answer. In `llama3_json` and `pythonic`, a call is recognized only at the
beginning of the content. The arguments of a call become canonical JSON. A malformed call is content.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from perilune.data.tool_calls import ToolCall, describe_tools, write_call
from perilune.serve.tool_format_names import ToolFormatName

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of the arguments of functions, by name."""

NAME = r"[\w.:/-]{1,64}"  # of a function
MAX_CALLS = 128  # of a message
_STRUCTURE = re.compile(r"""["'\\{}\[\]()]""")
_OPENING_BRACKET = {"}": "{", "]": "[", ")": "("}
_MAX_EXPRESSION_CHARS = 1 << 16  # longer texts are not passed to Python's parser


class Brackets:
    """Finds the end of a bracketed expression in a text that grows. Each character is read once.

    Args:
        quotes: characters that begin and end strings.
    """

    def __init__(self, quotes: str = '"') -> None:
        self._quotes, self._position = quotes, 0
        self._open: list[str] = []
        self._quote, self._escaped = "", -1

    def end(self, text: str, start: int) -> int | None:
        """Return the end of the expression that begins at `start`; None while it is open.

        If the expression is malformed, return the negative of the index after the first wrong character.
        """
        self._position = max(self._position, start)
        for match in _STRUCTURE.finditer(text, self._position):
            character, index = match[0], match.start()
            self._position = index + 1
            if index == self._escaped:
                continue
            if self._quote:
                if character == "\\":
                    self._escaped = index + 1
                elif character == self._quote:
                    self._quote = ""
            elif character in self._quotes:
                self._quote = character
            elif character in _OPENING_BRACKET:
                if self._open[-1:] != [_OPENING_BRACKET[character]]:
                    return -self._position
                self._open.pop()
                if not self._open:
                    return self._position
            elif character in "{[(":
                self._open.append(character)
        self._position = max(self._position, len(text))
        return None


class Spelling(NamedTuple):
    """The texts around the names and the JSON arguments of calls.

    Attributes:
        opening, closing: around all calls.
        before, between, after: around the name and the arguments of a call.
        separator: between calls.
    """

    opening: str
    before: str
    between: str
    after: str
    separator: str
    closing: str


@dataclass(frozen=True, slots=True)
class ParsedText:
    """The result of parsing the beginning of a text.

    Attributes:
        calls: the calls in it; none if it is content.
    """

    length: int
    calls: Sequence[ToolCall] = ()


class ToolFormat(ABC):
    """A format of tool calls.

    Attributes:
        marks: control tokens that must appear in the decoded text of an answer.
        quotes: characters that begin and end strings in calls.
        usage: instructions for a model whose chat template does not describe tools.
        spelling: how calls are spelled; None if their arguments are not JSON, or calls cannot be forced.
        template_mark: a text that identifies the format in a chat template.
        channels: whether an answer consists of messages in channels, which `ChannelsReader` reads.
    """

    name: ToolFormatName
    marks: tuple[str, ...] = ()
    quotes = '"'
    usage = ""
    spelling: Spelling | None = None
    template_mark: str
    channels = False

    def find_call(self, text: str, *, at_start: bool) -> int:
        """Return the index of a call in `text`, or of its possible beginning; the length of `text` if none.

        Args:
            at_start: whether only white space and calls precede `text`.
        """
        return find_mark(text, self.marks[0])

    @abstractmethod
    def parse(self, text: str, brackets: Brackets) -> ParsedText | None:
        """Parse `text`, which starts where `find_call` pointed; None while more text is needed."""

    @abstractmethod
    def format_calls(self, calls: Sequence[ToolCall]) -> str:
        """Format calls as text."""

    def matches_template(self, template: str) -> bool:
        """Return whether a chat template uses this format."""
        return self.template_mark in template

    def with_schemas(self, schemas: Schemas) -> ToolFormat:
        """Return the format for calls of these functions, for formats whose parser needs argument types."""
        return self

    def describe(self, tools: Iterable[Mapping[str, Any]], system: str) -> str:
        """Return a system message with a description of tools at its end."""
        documents = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        description = f"You may call these tools:\n{documents}\n{self.usage}"
        return f"{system}\n\n{description}" if system else description

    def new_id(self, name: str, number: int) -> str:
        """Return an id for call `number` of a conversation, from 0."""
        return f"call_{secrets.token_hex(12)}"


class Hermes(ToolFormat):
    name: ToolFormatName = "hermes"
    _open, _close = marks = ("<tool_call>", "</tool_call>")
    template_mark = _open
    spelling = Spelling("", f'{_open}\n{{"name": "', '", "arguments": ', f"}}\n{_close}", "\n", "")

    def parse(self, text: str, brackets: Brackets) -> ParsedText | None:
        end = text.find(self._close)
        if end < 0:
            return None
        end += len(self._close)
        call = _parse_json(text[len(self._open) : end - len(self._close)])
        return ParsedText(end, _canonical_calls([_call_fields(call, "arguments")]))

    def format_calls(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(map(write_call, calls))

    def describe(self, tools: Iterable[Mapping[str, Any]], system: str) -> str:
        return describe_tools(tools, system)


class TaggedFormat(Hermes):
    """A format with arguments as texts between tags. The schema of a function says which of them are strings.

    Forced calls are spelled as in Hermes, which the parser of the format reads too.

    Attributes:
        call, argument: regular expressions of a call and of an argument, each with a name and a value.
        texts: around the name of a call, its arguments, and the name and the value of an argument.
    """

    call: re.Pattern[str]
    argument: re.Pattern[str]
    texts: tuple[str, ...]

    def __init__(self, schemas: Schemas | None = None) -> None:
        self._schemas = schemas or {}

    def with_schemas(self, schemas: Schemas) -> ToolFormat:
        return type(self)(schemas)

    def parse(self, text: str, brackets: Brackets) -> ParsedText | None:
        parsed = super().parse(text, brackets)
        if parsed is None or parsed.calls:
            return parsed
        inner = text[len(self._open) : parsed.length - len(self._close)]
        call = self.call.fullmatch(inner)
        arguments = None if call is None else self._arguments(call[2])
        if call is None or arguments is None:
            return parsed
        schema = self._schemas.get(call[1], {}).get("properties")
        kinds = schema if isinstance(schema, Mapping) else {}
        typed = {name: _parse_argument(value, kinds.get(name)) for name, value in arguments}
        return ParsedText(parsed.length, _canonical_calls([(call[1], typed)]))

    def _arguments(self, text: str) -> list[tuple[str, str]] | None:
        """Return the names and values, parsed in linear time; None if one is malformed."""
        arguments, position = [], 0
        while position < len(text):
            argument = self.argument.match(text, position)
            if argument is None:
                return None
            arguments.append((argument[1], argument[2]))
            position = argument.end()
        return arguments

    def format_calls(self, calls: Sequence[ToolCall]) -> str:
        before, after, begin, between, end, closing = self.texts
        written = []
        for name, arguments in calls:
            value = _parse_json(arguments)
            texts = [
                f"{begin}{key}{between}{item if isinstance(item, str) else json.dumps(item)}{end}"
                for key, item in (value.items() if isinstance(value, dict) else ())
            ]
            written.append(f"{self._open}{before}{name}{after}{''.join(texts)}{closing}{self._close}")
        return "\n".join(written)

    def describe(self, tools: Iterable[Mapping[str, Any]], system: str) -> str:
        return ToolFormat.describe(self, tools, system)


class Qwen3Coder(TaggedFormat):
    name = "qwen3_coder"
    template_mark = "<function="
    call = re.compile(rf"\s*<function=({NAME})>\s*(.*?)</function>\s*", re.DOTALL)
    argument = re.compile(r"<parameter=([^>\n]{1,256})>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
    texts = ("\n<function=", ">\n", "<parameter=", ">\n", "\n</parameter>\n", "</function>\n")
    usage = (
        "To call one, write <tool_call><function=NAME><parameter=ARGUMENT>VALUE</parameter>"
        "</function></tool_call>."
    )


class Glm45(TaggedFormat):
    name = "glm45"
    template_mark = "<arg_key>"
    call = re.compile(rf"\s*({NAME})\s*((?:<arg_key>.*)?)", re.DOTALL)
    argument = re.compile(r"<arg_key>([^<]{1,256})</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
    texts = ("", "\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "")
    usage = (
        "To call one, write <tool_call>NAME<arg_key>ARGUMENT</arg_key><arg_value>VALUE</arg_value>"
        "</tool_call>."
    )


class Mistral(ToolFormat):
    name = "mistral"
    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    template_mark = marks[0]
    usage = 'To call some, write [TOOL_CALLS][{"name": NAME, "arguments": {...}}, ...] at the end.'
    _head = re.compile(
        rf"\s*(?:({NAME})\s*(?:\[CALL_ID\]\w{{1,64}}\s*)?(?:\[ARGS\]\s*)?(?=\{{)|(?=\[[\s{{\]]))"
    )
    _longest_head = 256
    spelling = Spelling(f"{marks[0]}[", '{"name": "', '", "arguments": ', "}", ", ", "]")

    def parse(self, text: str, brackets: Brackets) -> ParsedText | None:
        mark = len(self.marks[0])
        if len(text) < mark:
            return None
        head = self._head.match(text, mark)
        if head is None:
            return None if len(text) < mark + self._longest_head else ParsedText(mark)
        end = brackets.end(text, head.end())
        if end is None:
            return None
        if end < 0:  # continue after the wrong character, so that the time stays linear
            return ParsedText(-end)
        value = _parse_json(text[head.end() : end])
        calls = [(head[1], value)] if head[1] else [_call_fields(item, "arguments") for item in _list(value)]
        return ParsedText(end, _canonical_calls(calls))

    def format_calls(self, calls: Sequence[ToolCall]) -> str:
        texts = ", ".join(f'{{"name": {json.dumps(name)}, "arguments": {values}}}' for name, values in calls)
        return f"{self.marks[0]}[{texts}]"

    def new_id(self, name: str, number: int) -> str:
        """Return nine letters and digits, which Mistral's chat templates demand."""
        return secrets.token_hex(5)[:9]


class NamedMistral(Mistral):
    """The format of Mistral's models from tokenizer version 11."""

    spelling = Spelling("", Mistral.marks[0], Mistral.marks[1], "", "", "")

    def matches_template(self, template: str) -> bool:
        return all(mark in template for mark in self.marks[:2])


class Llama3Json(ToolFormat):
    name = "llama3_json"
    spelling = Spelling("", '{"name": "', '", "parameters": ', "}", "; ", "")
    usage = 'To call one, write {"name": NAME, "parameters": {...}} and nothing else.'
    _tag = "<|python_tag|>"  # a control token of Llama, so it is usually not in the text
    _before = re.compile(rf"[\s;]*(?:{re.escape(_tag)}\s*)?")

    def find_call(self, text: str, *, at_start: bool) -> int:
        return 0 if at_start else len(text)

    def parse(self, text: str, brackets: Brackets) -> ParsedText | None:
        start = self._before.match(text).end()  # type: ignore[union-attr]
        rest = text[start : start + len(self._tag)]
        if self._tag.startswith(rest):
            return None
        if rest[0] != "{":
            return ParsedText(len(text))
        end = brackets.end(text, start)
        if end is None:
            return None
        value = _parse_json(text[start:end]) if end > 0 else None
        calls = _canonical_calls([_call_fields(value, "parameters", "arguments")])
        return ParsedText(end, calls) if calls else ParsedText(len(text))

    def format_calls(self, calls: Sequence[ToolCall]) -> str:
        return "; ".join(f'{{"name": {json.dumps(name)}, "parameters": {values}}}' for name, values in calls)

    def matches_template(self, template: str) -> bool:
        return self._tag in template or ('"parameters":' in template and "ipython" in template)


class Pythonic(ToolFormat):
    name = "pythonic"
    quotes = "\"'"
    usage = "To call some, write [NAME(ARGUMENT=VALUE, ...), ...] and nothing else."
    template_mark = "[func_name1("  # of the instructions that Meta gives for this format
    _may_begin = re.compile(rf"\s*(?:\[\s*(?:{NAME}\s*)?)?")
    _begins = re.compile(rf"\s*(?=\[\s*{NAME}\s*\()")

    def find_call(self, text: str, *, at_start: bool) -> int:
        return 0 if at_start else len(text)

    def parse(self, text: str, brackets: Brackets) -> ParsedText | None:
        begun = self._begins.match(text)
        if begun is None:
            return None if self._may_begin.fullmatch(text) else ParsedText(len(text))
        end = brackets.end(text, begun.end())
        if end is None:
            return None
        calls = _canonical_calls(_parse_python_calls(text[begun.end() : end])) if end > 0 else ()
        return ParsedText(end, calls) if calls else ParsedText(len(text))

    def format_calls(self, calls: Sequence[ToolCall]) -> str:
        return f"[{', '.join(f'{name}({_python_arguments(values)})' for name, values in calls)}]"


class ControlTokenFormat(ToolFormat):
    """A format with control tokens around all calls, around each call, and before its JSON arguments.

    Attributes:
        call: the regular expression of a call, with its name and its arguments.
    """

    call: re.Pattern[str]

    def parse(self, text: str, brackets: Brackets) -> ParsedText | None:
        inner, mark, _ = text[len(self.marks[0]) :].partition(self.marks[-1])
        if not mark:
            return None
        calls, position = [], 0
        while position < len(inner.rstrip()):
            call = self.call.match(inner, position)
            calls.append((None, None) if call is None else (call[1], _parse_json(call[2])))
            position = len(inner) if call is None else call.end()
        return ParsedText(len(self.marks[0]) + len(inner) + len(mark), _canonical_calls(calls))

    def format_calls(self, calls: Sequence[ToolCall]) -> str:
        opening, before, between, after, separator, closing = self.spelling  # type: ignore[misc]
        return (
            opening + separator.join(f"{before}{name}{between}{raw}{after}" for name, raw in calls) + closing
        )

    @property
    def usage(self) -> str:  # type: ignore[override]
        return f"To call some, write {self.format_calls([('NAME', '{...}')])} at the end."


class DeepSeekV31(ControlTokenFormat):
    name: ToolFormatName = "deepseek_v31"
    marks = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )
    _opening, _before, _between, _after, _closing = marks
    spelling = Spelling(_opening, _before, _between, _after, "", _closing)
    call = re.compile(rf"\s*{_before}\s*({NAME})\s*{_between}(.*?){_after}", re.DOTALL)
    template_mark = _before


class DeepSeekV3(DeepSeekV31):
    name = "deepseek_v3"
    _opening, _before, _between, _after, _closing = DeepSeekV31.marks
    spelling = Spelling(
        _opening, f"{_before}function{_between}", "\n```json\n", f"\n```{_after}", "\n", _closing
    )
    call = re.compile(
        rf"\s*{_before}\s*function\s*{_between}\s*({NAME})\s*```json(.*?)```\s*{_after}", re.DOTALL
    )
    template_mark = "```json"

    def matches_template(self, template: str) -> bool:
        return super().matches_template(template) and self._before in template


class KimiK2(ControlTokenFormat):
    name = "kimi_k2"
    marks = (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    )
    _opening, _before, _between, _after, _closing = marks
    spelling = Spelling(_opening, f"{_before}functions.", f":0{_between}", _after, "", _closing)
    call = re.compile(
        rf"\s*{re.escape(_before)}\s*(?:functions\.)?([\w./-]{{1,64}}):\d+\s*{re.escape(_between)}(.*?)"
        rf"{re.escape(_after)}",
        re.DOTALL,
    )
    template_mark = _before

    def new_id(self, name: str, number: int) -> str:
        """Return the id that the model reads in its chat template."""
        return f"functions.{name}:{number}"


class Harmony(ToolFormat):
    name = "openai"
    channels = True
    marks = ("<|channel|>", "<|constrain|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>")
    spelling = Spelling(
        "", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", "", ""
    )  # then <|call|> ends the answer
    usage = (
        "To call one, write "
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|> at the end."
    )
    _call = re.compile(rf"[^{{]*?\bto=functions\.({NAME})[^{{]*?<\|message\|>(.*?)<\|call\|>", re.DOTALL)

    def parse(self, text: str, brackets: Brackets) -> ParsedText | None:
        call = self._call.match(text)
        if call is None:
            return None
        return ParsedText(call.end(), _canonical_calls([(call[1], _parse_json(call[2]))]))

    def format_calls(self, calls: Sequence[ToolCall]) -> str:
        return "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
            for name, arguments in calls
        )

    def matches_template(self, template: str) -> bool:
        return all(mark in template for mark in self.marks[:1] + self.marks[2:4])


FORMATS: Mapping[str, ToolFormat] = {
    form.name: form
    for form in (
        Qwen3Coder(),
        Glm45(),
        Hermes(),
        Mistral(),
        Pythonic(),
        Llama3Json(),
        DeepSeekV3(),
        DeepSeekV31(),
        KimiK2(),
        Harmony(),
    )
}
_DETECTED = (NamedMistral(), *FORMATS.values())


def detect_format(template: str | None) -> ToolFormat:
    """Return the format of a chat template; Hermes if it shows none."""
    return next((form for form in _DETECTED if form.matches_template(template or "")), FORMATS["hermes"])


def find_mark(text: str, mark: str) -> int:
    """Return the index of `mark` in `text`, or of a part of it at the end of `text`; len(text) if none."""
    index = text.find(mark)
    if index >= 0:
        return index
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return len(text) - next((length for length in lengths if text.endswith(mark[:length])), 0)


def _parse_json(text: str) -> Any:
    """Parse a JSON text; None if it is malformed. Floats beyond 64 bits become the largest float."""
    largest = sys.float_info.max
    try:
        return json.loads(text, parse_float=lambda number: max(min(float(number), largest), -largest))
    except (ValueError, RecursionError):
        return None


def _parse_argument(text: str, schema: Any) -> Any:
    """Parse an argument that is written as text: JSON, unless its schema allows strings."""
    kinds = _allowed_types(schema)
    if "string" in kinds and not ("null" in kinds and text == "null"):
        return text
    literals = {"True": True, "False": False, "None": None, "null": None}
    if text in literals:
        return literals[text]
    value = _parse_json(text)
    return text if value is None else value


def _allowed_types(schema: Any) -> set[str]:
    """Return the names of the types that a schema allows; none if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kind, values = schema.get("type"), schema.get("enum")
    kinds = kind if isinstance(kind, list) else [kind]
    names = {name for name in kinds if isinstance(name, str)}
    if isinstance(values, list):
        names |= {"string" for value in values if isinstance(value, str)}
    choices = (schema.get(key) for key in ("anyOf", "oneOf"))
    return names.union(*(_allowed_types(one) for some in choices if isinstance(some, list) for one in some))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [None]


def _call_fields(value: Any, *names: str) -> tuple[Any, Any]:
    """Return the name and arguments of a call that is a JSON object."""
    if not isinstance(value, dict):
        return None, None
    return value.get("name"), next((value[name] for name in names if name in value), None) or {}


def _python_arguments(arguments: str) -> str:
    """Convert JSON arguments to those of a Python call. Text that is not a JSON object stays unchanged."""
    value = _parse_json(arguments)
    if not isinstance(value, dict):
        return arguments
    return ", ".join(f"{key}={item!r}" for key, item in value.items())


def _parse_python_calls(text: str) -> list[tuple[Any, Any]]:
    """Parse a list of Python calls whose arguments are literals."""
    if len(text) > _MAX_EXPRESSION_CHARS:
        return []
    try:
        expression = ast.parse(text, mode="eval").body
        calls = expression.elts if isinstance(expression, ast.List) else []
        return [
            (ast.unparse(call.func), {item.arg: ast.literal_eval(item.value) for item in call.keywords})
            if isinstance(call, ast.Call) and not call.args and all(item.arg for item in call.keywords)
            else (None, None)
            for call in calls
        ]
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return []


def _canonical_calls(calls: Sequence[tuple[Any, Any]]) -> Sequence[ToolCall]:
    """Return the calls with their arguments as JSON; none if one of them is malformed."""
    read = []
    for name, arguments in calls:
        if not isinstance(name, str) or not re.fullmatch(NAME, name) or not isinstance(arguments, dict):
            return ()
        try:
            text = json.dumps(arguments, sort_keys=True, ensure_ascii=False, allow_nan=False)
            text.encode()
        except (ValueError, TypeError, RecursionError):
            return ()  # a set, bytes, keys of several kinds, half a surrogate
        read.append((name, text))
    return read
