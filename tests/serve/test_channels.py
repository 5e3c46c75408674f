"""Answers of gpt-oss: reasoning, content and calls in the channels of the harmony format."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parts_cases import read_pieces
from served import served
from tokenizers import AddedToken

from perilune.models.checkpoints.loading import new_model, save_checkpoint
from perilune.models.config.decoder_config import PRESETS
from perilune.models.text.tokenizer import Tokenizer
from perilune.serve.channels import ChannelsReader
from perilune.serve.parts import Beginning, Parts
from perilune.serve.tool_formats import FORMATS, detect_format

FORM = FORMATS["openai"]
THOUGHT = "<|channel|>analysis<|message|>2 and 2<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
PIECES = [
    THOUGHT, CALL, "<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant", "<|call|>", "final", " to=",
    "functions.add", "<|constrain|>json", '{"a": 1}', "t", "to", "<", "<|", "<|en", "text", " ", "\n", "é",
]  # fmt: skip


def read(pieces: list[str], *, calls: bool = True, beginning: Beginning = "channels") -> Parts:
    """Read all pieces; consecutive texts of one kind are joined."""
    return read_pieces(ChannelsReader(calls=FORM if calls else None, beginning=beginning), pieces)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"{THOUGHT}<|channel|>final<|message|>4<|return|>", "2 and 2", "4", []),
        (f"{THOUGHT}<|channel|>final<|message|>4", "2 and 2", "4", []),  # the last mark ended the answer
        (f"{THOUGHT}{CALL}", "2 and 2", "", [("add", {"a": 1})]),
        (f"{THOUGHT}{CALL.removesuffix('<|call|>')}", "2 and 2", "", [("add", {"a": 1})]),
        (f"{CALL}<|start|>assistant{CALL}", "", "", [("add", {"a": 1})] * 2),
        (" to=functions.add<|channel|>commentary json<|message|>{}<|call|>", "", "", [("add", {})]),
        ("<|channel|>commentary<|message|>I add.<|end|><|start|>assistant" + CALL, "", "I add.",
         [("add", {"a": 1})]),
        ("<|channel|>commentary to=functions.add <|constrain|>json<|message|>{'a'", "", "{'a'", []),
        ("<|channel|>analysis to=python<|message|>1+1<|call|>", "1+1", "", []),
        ("<|channel|>analysis<|message|>cut", "cut", "", []),
        ("<|channel|>anal", "", "<|channel|>anal", []),
        ("no header", "", "no header", []),
        ("to be", "", "to be", []),
        ("", "", "", []),
    ],
)  # fmt: skip
def test_channels_become_reasoning_content_and_calls(
    text: str, reasoning: str, content: str, calls: list[tuple[str, object]]
) -> None:
    parts = read([text])
    assert (parts.reasoning, parts.content) == (reasoning, content)
    assert [(name, json.loads(arguments)) for name, arguments in parts.calls] == calls


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(PIECES), max_size=12), st.data())
def test_parts_do_not_depend_on_how_text_is_split(words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces).items == read([text]).items


def test_channels_reader_streams_text_during_generation() -> None:
    reader = ChannelsReader(calls=FORM)
    assert not reader.feed("<|channel|>analysis<|message|>", last=False).items
    assert reader.feed("so ", last=False).items == [("reasoning", "so ")]
    assert reader.feed("4 <", last=False).items == [("reasoning", "4 ")]
    assert reader.feed("|end|><|start|>assistant<|channel|>final<|message|>4", last=False).items == [
        ("content", "4")
    ]


def test_calls_are_content_in_a_request_without_tools() -> None:
    assert read([CALL], calls=False).content == '{"a": 1}'


def test_continued_message_has_no_header() -> None:
    assert read(["is 5<|return|>"], beginning="content").content == "is 5"


def test_channels_reader_drops_calls_beyond_most_calls() -> None:
    reader = ChannelsReader(calls=FORM, max_calls=1)
    assert len(reader.feed(f"{CALL}<|start|>assistant{CALL}", last=True).calls) == 1


def test_forced_calls_stream_their_arguments_after_the_reasoning() -> None:
    reader = ChannelsReader(calls=FORM, forced=True)
    assert reader.feed(THOUGHT, last=False).items == [("reasoning", "2 and 2")]
    assert not reader.feed("<|channel|>commentary to=functions.add <|constrain|>json", last=False).items
    assert reader.feed('<|message|>{"a"', last=False).items == [("call", ("add", '{"a"'))]
    assert reader.feed(": 1}", last=False).items == [("arguments", ": 1}"), ("end", "")]
    assert not reader.feed("", last=True).items


def test_truncated_forced_call_stays_open() -> None:
    reader = ChannelsReader(calls=FORM, forced=True)
    parts = reader.feed('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a', last=True)
    assert parts.items == [("call", ("add", '{"a'))]


def test_template_of_gpt_oss_selects_the_format() -> None:
    template = "<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>"
    assert detect_format(template) is FORM


@pytest.mark.slow
def test_server_separates_reasoning_and_holds_the_final_message_to_a_schema(tmp_path: Path) -> None:
    tokenizer = Tokenizer.byte_level()
    tokenizer._backend.add_special_tokens([AddedToken(mark, special=True) for mark in FORM.marks])
    tokenizer = tokenizer.with_chat_template(
        "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>"
        "{% endfor %}<|start|>assistant{# <|channel|> #}",
        where="test",
    )
    shape = PRESETS["tiny"].replace(initializer_range=0.1, max_position_embeddings=4096)
    save_checkpoint(tmp_path / "m", new_model(shape, tokenizer, seed=0), tokenizer)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "?"}], "n": 8, "seed": 1}
    asked |= {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    with served(tmp_path / "m", "--slots", "8") as server, server.client() as client:
        bias = {str(tokenizer._backend.token_to_id("<|end|>")): 6}  # keeps reasoning short
        choices = client.chat.completions.create(**asked, max_tokens=800, logit_bias=bias).choices
        complete = [choice for choice in choices if choice.finish_reason == "stop"]
        assert len(complete) > 4
        assert {json.loads(choice.message.content or "")["a"] for choice in complete} <= {1, 2}
        assert any(getattr(choice.message, "reasoning_content", None) for choice in complete)
        del asked["response_format"]
        asked |= {"tools": tools, "tool_choice": "required", "max_tokens": 800, "logit_bias": bias}
        choices = client.chat.completions.create(**asked).choices
        complete = [choice for choice in choices if choice.finish_reason == "tool_calls"]
        assert len(complete) > 4
        for choice in complete:
            (call,) = choice.message.tool_calls or ()
            assert call.function.name == "add" and json.loads(call.function.arguments)["a"] in (1, 2)
            assert not choice.message.content
        assert any(getattr(choice.message, "reasoning_content", None) for choice in complete)
