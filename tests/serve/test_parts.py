"""Reasoning, content and tool calls in the text of an answer, whole and in any pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.serve.parts import Parts, PartsReader

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
MARKS = [
    "<think>",
    "</think>",
    CALL,
    "<tool_call>",
    "</tool_call>",
    "<tool",
    "<",
    " ",
    "\n",
    "text",
    "{",
    "é",
]


def read(pieces: list[str], *, tools: bool = True, reasoning: bool = True, opened: bool = False) -> Parts:
    reader = PartsReader(tools=tools, reasoning=reasoning, opened=opened)
    whole = Parts()
    for place, piece in enumerate(pieces):
        parts = reader.feed(piece, last=place == len(pieces) - 1)
        whole.reasoning += parts.reasoning
        whole.content += parts.content
        whole.calls += parts.calls
    return whole


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
def test_parts_of_an_answer(text: str, reasoning: str, content: str, calls: int) -> None:
    parts = read([text])
    assert (parts.reasoning, parts.content, len(parts.calls)) == (reasoning, content, calls)
    assert all((name, json.loads(arguments)) == ("add", {"a": 1}) for name, arguments in parts.calls)


def test_reasoning_that_the_prompt_has_begun() -> None:
    parts = read(["so 5", "</thi", "nk>", "\n5"], opened=True)
    assert (parts.reasoning, parts.content) == ("so 5", "5")


def test_what_is_not_asked_for_is_content() -> None:
    text = f"<think>x</think>{CALL}"
    assert read([text], tools=False, reasoning=False).content == text
    assert read([text], tools=False).content == CALL
    assert read([text], reasoning=False).content == "<think>x</think>"


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(MARKS), max_size=12), st.data())
def test_pieces_give_the_parts_of_the_whole(words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    tools, reasoning, opened = (data.draw(st.booleans()) for _ in range(3))
    options = {"tools": tools, "reasoning": reasoning, "opened": opened}
    assert read(pieces, **options) == read([text], **options)
    if not tools and not reasoning:
        assert read([text], **options).content == text
