"""Reasoning, content and tool calls in the text of an answer, read whole or in pieces."""

import json
import time
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parts_cases import read_pieces
from tokenizers import AddedToken

from perilune.models.text.tokenizer import Tokenizer
from perilune.serve.parts import Beginning, Parts, PartsReader
from perilune.serve.tool_formats import FORMATS, detect_format

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CALLED = '[TOOL_CALLS]add[ARGS]{"a": 1}'
LONE = {  # half of a surrogate pair, which UTF-8 cannot encode
    "hermes": '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
    "llama3_json": '{"name": "add", "parameters": {"a": "\\ud800"}}',
    "pythonic": r'[add(a="\ud800")]',
}
CUT = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
TAGGED = "<tool_call><function=add><parameter=a>1</function></tool_call>"
COMMON = ["<think>", "</think>", " ", "\n", "text", "{", "}", "[", "]", "(", '"', "\\", "é", ";"]
MARKS = {
    "hermes": [CALL, "<tool_call>", "</tool_call>", "<tool", "<"],
    "mistral": [
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": "]}"}}]',
        '[TOOL_CALLS]add[ARGS]{"a": 1}',
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]abc",
        "add",
        '{"a": "\\""}',
        "[TOOL",
    ],
    "llama3_json": [
        '{"name": "add", "parameters": {"a": "}"}}',
        "<|python_tag|>",
        '{"a": 1}',
        "<|py",
        "; ",
        '{"name": ',
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>",
        "<function=add>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "</tool_call>",
    ],
    "glm45": [
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "<tool_call>",
        "add",
        "<arg_key>a</arg_key>",
        "<arg_value>1</arg_value>",
        "</tool_call>",
        "</tool",
    ],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": "```"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function",
        "<｜tool▁sep｜>add",
        "```json",
        "```",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool",
    ],
    "deepseek_v31": [
        f"{CUT}<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>add",
        "<｜tool▁sep｜>",
        '{"a": 1}',
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.add:3",
        "<|tool_call_argument_begin|>",
        '{"a": 1}',
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        "<|tool_calls",
    ],
    "openai": [
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
        "<|channel|>",
        "to=functions.add",
        "<|message|>",
        "<|call|>",
    ],
    "pythonic": ["[add(a=1), sub(b='(]')]", "[add(", "a=1", "'", ")]", "[f()]", "[1]", ", "],
}


def read(pieces: list[str], *, calls: str | None = "hermes", beginning: Beginning = "start") -> Parts:
    """Read all pieces; consecutive texts of one kind are joined."""
    return read_pieces(PartsReader(calls=FORMATS[calls] if calls else None, beginning=beginning), pieces)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("plain text", "", "plain text", 0),
        (f"<think>sum</think>\n\nLet me add.\n{CALL}\n{CALL}", "sum", "Let me add.", 2),
        (f"{CALL} done", "", "done", 1),
        ("<think>cut off", "cut off", "", 0),
        ('<tool_call>{"name": "add"', "", '<tool_call>{"name": "add"', 0),
        ("<tool_call>no JSON</tool_call>", "", "<tool_call>no JSON</tool_call>", 0),
        ('<tool_call>{"name": 1}</tool_call>!', "", '<tool_call>{"name": 1}</tool_call>!', 0),
        ("a <think> later", "", "a <think> later", 0),
        ("", "", "", 0),
    ],
)  # fmt: skip
def test_parts_reader_splits_reasoning_content_and_calls(
    text: str, reasoning: str, content: str, calls: int
) -> None:
    parts = read([text])
    assert (parts.reasoning, parts.content, len(parts.calls)) == (reasoning, content, calls)
    assert all((name, json.loads(arguments)) == ("add", {"a": 1}) for name, arguments in parts.calls)


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        ("mistral", 'I add. [TOOL_CALLS] [{"name": "add", "arguments": {"a": "[TOOL]]"}, "id": "1a"}]',
         "I add.", [("add", {"a": "[TOOL]]"})]),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]sub[CALL_ID]x1[ARGS]{"b": {}}', "",
         [("add", {"a": 1}), ("sub", {"b": {}})]),
        ("mistral", '[TOOL_CALLS]add{"a": 1}', "", [("add", {"a": 1})]),
        ("mistral", '[TOOL_CALLS]add[ARGS]{a: 1}', '[TOOL_CALLS]add[ARGS]{a: 1}', []),
        ("mistral", '[TOOL_CALLS][{"name": "add"}, 3]', '[TOOL_CALLS][{"name": "add"}, 3]', []),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": ', '[TOOL_CALLS]add[ARGS]{"a": ', []),
        ("mistral", '[{"name": "add"}]', '[{"name": "add"}]', []),
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": "\\"}"}}; {"name": "b"}',
         "", [("add", {"a": '"}'}), ("b", {})]),
        ("llama3_json", '\n{"name": "add", "arguments": {"a": 1}}', "", [("add", {"a": 1})]),
        ("llama3_json", '{"answer": 5}', '{"answer": 5}', []),
        ("llama3_json", 'Call {"name": "add"}', 'Call {"name": "add"}', []),
        ("llama3_json", '{"name": "add", "parameters": [1]}', '{"name": "add", "parameters": [1]}', []),
        ("pythonic", "[add(a=-1, b=[None, 'x)]'], c={'k': True}), math.sub()]", "",
         [("add", {"a": -1, "b": [None, "x)]"], "c": {"k": True}}), ("math.sub", {})]),
        ("pythonic", "[1, 2]", "[1, 2]", []),
        ("pythonic", "[add(1)]", "[add(1)]", []),
        ("pythonic", "[add(a=open('f'))]", "[add(a=open('f'))]", []),
        ("pythonic", "[add(a={1, 2})]", "[add(a={1, 2})]", []),
        ("pythonic", "[add(a=1e999)]", "[add(a=1e999)]", []),
        ("pythonic", "[add(**x)]", "[add(**x)]", []),
        ("pythonic", "[add(**{'a': 1})]", "[add(**{'a': 1})]", []),
        ("pythonic", "See [add(a=1)]", "See [add(a=1)]", []),
        ("qwen3_coder", "I add.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n"
         "x\n<y>\n</parameter>\n<parameter=c>\nTrue\n</parameter>\n</function>\n</tool_call>", "I add.",
         [("add", {"a": 1, "b": "x\n<y>", "c": True})]),
        ("qwen3_coder", "<tool_call><function=add></function></tool_call>" + CALL, "",
         [("add", {}), ("add", {"a": 1})]),
        ("qwen3_coder", TAGGED, TAGGED, []),
        ("glm45", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>[1, null]</arg_value>\n"
         "<arg_key>b</arg_key>\n<arg_value>it's</arg_value>\n</tool_call>", "",
         [("add", {"a": [1, None], "b": "it's"})]),
        ("glm45", "<tool_call>add</tool_call>" + CALL, "", [("add", {}), ("add", {"a": 1})]),
        ("glm45", "<tool_call>add 1</tool_call>", "<tool_call>add 1</tool_call>", []),
        ("deepseek_v3", "I add.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
         '```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>math.sub\n'
         "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "I add.",
         [("add", {"a": 1}), ("math.sub", {})]),
        ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": "é"}'
         "<｜tool▁call▁end｜><｜tool▁call▁begin｜>sub<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
         "", [("add", {"a": "é"}), ("sub", {})]),
        ("deepseek_v31", CUT, CUT, []),
        ("deepseek_v31", f"{CUT}no call<｜tool▁calls▁end｜>", f"{CUT}no call<｜tool▁calls▁end｜>", []),
        ("kimi_k2", "Two.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
         '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_call_begin|>math.sub:1 '
         "<|tool_call_argument_begin|> {}<|tool_call_end|><|tool_calls_section_end|>", "Two.",
         [("add", {"a": 1}), ("math.sub", {})]),
        ("hermes", LONE["hermes"], LONE["hermes"], []),
        ("llama3_json", LONE["llama3_json"], LONE["llama3_json"], []),
        ("pythonic", LONE["pythonic"], LONE["pythonic"], []),
    ],
)  # fmt: skip
def test_parts_reader_reads_call_formats_of_other_model_families(
    kind: str, text: str, content: str, calls: list[Any]
) -> None:
    parts = read([text], calls=kind)
    assert (parts.content, [(name, json.loads(given)) for name, given in parts.calls]) == (content, calls)


@pytest.mark.parametrize("text", ["[f(a=" + "-" * 60_000 + "1)]", "[f(a=" + "[" * 50_000, "[f(a=" * 20_000])
def test_overly_deep_or_long_pythonic_call_is_content(text: str) -> None:
    assert read([text], calls="pythonic").content == text


def test_write_keeps_arguments_that_are_not_json() -> None:
    assert FORMATS["pythonic"].format_calls([("f", "[1"), ("g", '{"a": null}')]) == "[f([1), g(a=None)]"


@pytest.mark.parametrize("kind", ["qwen3_coder", "glm45"])
def test_schema_decides_which_arguments_are_strings(kind: str) -> None:
    optional = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    properties = {
        "a": {"type": "string"},
        "b": {"type": ["string", "null"]},
        "c": {"type": "object"},
        "h": optional,
        "i": optional,
        "j": {"enum": ["1", "2"]},
        "k": {"type": None},
        "l": {"type": 5, "enum": 5, "anyOf": 5},
        "m": {"type": [[]]},
    }
    form = FORMATS[kind].with_schemas({"f": {"properties": properties}})
    given = {"a": "007", "b": None, "c": {"d": "</arg>"}, "e": 1.5, "g": "text"}
    given |= {"h": "12345", "i": None, "j": "1", "k": 1, "l": 2, "m": 3}
    text = form.format_calls([("f", json.dumps(given))])
    ((_, arguments),) = PartsReader(calls=form).feed(text, last=True).calls
    assert json.loads(arguments) == given


@pytest.mark.parametrize("inner", ["<parameter=a>", "</parameter><parameter=a>", "<arg_key>a", "a" + " " * 9])
@pytest.mark.parametrize("kind", ["qwen3_coder", "glm45"])
def test_malformed_tags_take_linear_time(kind: str, inner: str) -> None:
    before, after = ("<function=f>", "</function>") if kind == "qwen3_coder" else ("f\n", "")
    text = f"<tool_call>{before}{inner * 20_000}{after}</tool_call>"
    began = time.process_time()
    assert read([text], calls=kind).content == text
    assert time.process_time() - began < 1


def test_many_malformed_calls_take_linear_time() -> None:
    text = "[TOOL_CALLS][{" * 4000 + ")" + CALLED
    began = time.process_time()
    parts = read([text], calls="mistral")
    assert time.process_time() - began < 1
    assert (parts.content, parts.calls) == (text.removesuffix(CALLED), [("add", '{"a": 1}')])


def test_long_call_in_many_pieces_takes_linear_time() -> None:
    text = json.dumps({"name": "write", "parameters": {"text": "{[" * 50_000}})
    began = time.process_time()
    (call,) = read([text[start : start + 4] for start in range(0, len(text), 4)], calls="llama3_json").calls
    assert json.loads(call[1]) == {"text": "{[" * 50_000}
    assert time.process_time() - began < 5


@pytest.mark.parametrize("kind", FORMATS)
def test_written_calls_round_trip(kind: str) -> None:
    calls = [("add", '{"a": 1, "b": "\\"it\'s\\" [x]"}'), ("sub", "{}")]
    assert read([FORMATS[kind].format_calls(calls)], calls=kind).calls == calls
    about = FORMATS[kind].describe([{"name": "add"}], "Be brief.")
    assert about.startswith("Be brief.\n\nYou may call these tools:\n")
    assert '"add"' in about


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        (None, "hermes"),
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<|start_header_id|>ipython ... {{ '<|python_tag|>' }}", "llama3_json"),
        ("{%- if message.role == 'ipython' %}{{ '\"parameters\": ' }}", "llama3_json"),
        ("<tool_call>\n<function=example>", "qwen3_coder"),
        ("<tool_call>{name}\n<arg_key>", "glm45"),
        ("{{'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '```json'}}", "deepseek_v3"),
        ("{{'<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + tool['arguments']}}", "deepseek_v31"),
        ("<|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>", "kimi_k2"),
        ("in the format of [func_name1(params_name1=params_value1...), func_name2(params)]", "pythonic"),
    ],
)
def test_format_of_detects_tool_format_from_template(template: str | None, kind: str) -> None:
    assert detect_format(template).name == kind


def test_showing_tokenizer_decodes_control_tokens_of_calls() -> None:
    tokenizer = Tokenizer.byte_level()
    tokenizer._backend.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    mark = tokenizer._backend.token_to_id("[TOOL_CALLS]")
    sampled = [mark, *tokenizer.encode("é[TOOL_CALLS]"), tokenizer.eos_token_id]
    assert tokenizer.decode(sampled) == "é[TOOL_CALLS]"
    marked = tokenizer.showing(FORMATS["mistral"].marks)
    assert marked.decode(sampled) == "[TOOL_CALLS]é[TOOL_CALLS]"
    assert marked.boundaries.is_text(mark)
    assert not tokenizer.boundaries.is_text(mark)
    assert mark not in marked.encode("[TOOL_CALLS]")  # user text never becomes the control token
    assert tokenizer.showing(("[none]",)) is tokenizer


def test_parts_reader_continues_reasoning_begun_in_prompt() -> None:
    parts = read(["so 5", "</thi", "nk>", "\n5"], beginning="reasoning")
    assert (parts.reasoning, parts.content) == ("so 5", "5")


def test_disabled_parts_stay_content() -> None:
    text = f"<think>x</think>{CALL}"
    assert read([text], calls=None, beginning="content").content == text
    assert read([text], calls=None).content == CALL
    assert read([text], beginning="content").content == "<think>x</think>"


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_parts_do_not_depend_on_how_text_is_split(kind: str, data: st.DataObject) -> None:
    words = data.draw(st.lists(st.sampled_from([*COMMON, *MARKS[kind], *MARKS[kind]]), max_size=12))
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    with_calls, beginning = data.draw(st.booleans()), data.draw(st.sampled_from(get_args(Beginning)))
    options: Any = {"calls": kind if with_calls else None, "beginning": beginning}
    assert read(pieces, **options) == read([text], **options)
    if not with_calls and beginning == "content":
        assert read([text], **options).content == text
