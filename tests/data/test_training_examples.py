"""Training examples from every column convention, and errors for rows that follow none."""

import json
from pathlib import Path
from typing import Any

import pytest

from perilune.data.conversion import ImportDefaults, convert_files
from perilune.data.examples import Conversation, PlainText, read_comparison, read_demonstration
from perilune.data.sources import Row, read_rows
from perilune.errors import RequestError

USER = {"role": "user", "content": "2+2?"}
SAID = {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def row(**value: Any) -> Row:
    return Row("chats.jsonl:7", value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"messages": [USER, SAID]}, Conversation((USER,), (SAID,))),
        ({"messages": [USER, SAID, USER, WRONG], "id": 3}, Conversation((USER,), (SAID, USER, WRONG))),
        ({"messages": [USER, SAID], "prompt": "2+2?"}, Conversation((USER,), (SAID,))),
        (
            {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
            Conversation((USER,), (SAID,)),
        ),
        ({"prompt": [USER], "completion": [SAID]}, Conversation((USER,), (SAID,))),
        ({"prompt": [USER, WRONG, USER], "completion": [SAID]}, Conversation((USER, WRONG, USER), (SAID,))),
        ({"prompt": "2+2=", "completion": "4"}, PlainText("2+2=", "4")),
        ({"text": "2+2=4"}, PlainText("", "2+2=4")),
        (
            {"messages": [{"role": "developer", "content": [{"type": "text", "text": "x"}]}, USER, SAID]},
            Conversation(({"role": "system", "content": "x"}, USER), (SAID,)),
        ),
        ({"messages": json.dumps([USER, SAID])}, Conversation((USER,), (SAID,))),
        (
            {"messages": [USER, SAID], "tools": json.dumps([TOOL]), "chat_template_kwargs": {"think": False}},
            Conversation((USER,), (SAID,), {"think": False, "tools": [TOOL]}),
        ),
    ],
)
def test_demonstration_reads_each_column_convention(
    value: dict[str, Any], expected: Conversation | PlainText
) -> None:
    assert read_demonstration(row(**value)) == expected


def test_demonstration_normalizes_tool_calls() -> None:
    as_text = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    calls = {"role": "assistant", "content": None, "tool_calls": [as_text]}
    result = {"role": "tool", "content": "4", "tool_call_id": "a"}
    conversation = read_demonstration(row(messages=[USER, calls, result, SAID]))
    assert isinstance(conversation, Conversation)
    expected = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", **CALL}]}
    assert conversation.turns == (expected, result, SAID)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"messages": []}, "'messages' is not a list of messages"),
        ({"messages": "hello"}, "'messages' is not a list of messages"),
        ({"messages": [USER, "4"]}, "messages[1] is not a message"),
        ({"conversations": [{"from": ["gpt"], "value": "4"}]}, "conversations[0] is from ['gpt']"),
        ({"messages": [USER]}, "no message of the assistant"),
        ({"messages": [{"role": "boss", "content": "x"}, SAID]}, "messages[0] has the role 'boss'"),
        ({"messages": [{"role": "user"}, SAID]}, "messages[0] has no content"),
        ({"messages": [{"role": "user", "content": 3}, SAID]}, "messages[0] has content that is not text"),
        ({"messages": [USER, {**SAID, "weight": 0.5}]}, "messages[1] has a weight"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1] has a tool call"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [
                {"function": {"name": "f", "arguments": "{"}}]}]},
            "arguments that are not a JSON object",
        ),
        ({"messages": [USER, SAID], "tools": "add"}, "'tools' is not a list"),
        ({"messages": [USER, SAID], "chat_template_kwargs": {"messages": []}}, "'chat_template_kwargs'"),
        ({"prompt": "2+2?", "completion": [SAID]}, "must both be text or both be lists"),
        ({"prompt": [USER], "completion": [USER]}, "must begin with a message of the assistant"),
        ({"prompt": [USER, SAID], "completion": [SAID]}, "must not end with a message of the assistant"),
        ({"text": 3}, "'text' is not text"),
        ({"question": "x", "answer": "y"}, 'this row has "answer", "question"'),
        ({"chosen": "x", "rejected": "y"}, "task sft needs"),
        ({"messages": [USER, SAID], "digest": "0"}, "the field 'environment' is missing"),
    ],
)  # fmt: skip
def test_demonstration_rejects_invalid_rows(value: dict[str, Any], error: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_demonstration(row(**value))
    assert error in caught.value.what and caught.value.where == "chats.jsonl:7"


@pytest.mark.parametrize(
    ("value", "prompt", "answers"),
    [
        ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "2+2=", ("4", "5")),
        ({"chosen": "2+2= 4", "rejected": "2+2= 5"}, "2+2=", (" 4", " 5")),  # as TRL splits
        ({"prompt": [USER], "chosen": [SAID], "rejected": [WRONG]}, (USER,), ((SAID,), (WRONG,))),
        ({"chosen": [USER, SAID], "rejected": [USER, WRONG]}, (USER,), ((SAID,), (WRONG,))),
        ({"prompt": "2+2?", "chosen": [USER, SAID], "rejected": [USER, WRONG]}, (USER,), ((SAID,), (WRONG,))),
        (
            {"chosen": [USER, SAID, USER, SAID], "rejected": [USER, SAID, USER, WRONG], "score": None},
            (USER, SAID, USER), ((SAID,), (WRONG,)),
        ),
        (
            {"prompt": [USER], "chosen": [SAID, USER, SAID], "rejected": [WRONG]},
            (USER,), ((SAID, USER, SAID), (WRONG,)),
        ),
    ],
)  # fmt: skip
def test_comparison_reads_each_column_convention(value: dict[str, Any], prompt: Any, answers: Any) -> None:
    comparison = read_comparison(row(**value))
    kind = PlainText if isinstance(prompt, str) else Conversation
    assert (comparison.chosen, comparison.rejected) == (kind(prompt, answers[0]), kind(prompt, answers[1]))


def test_comparisons_with_equal_prompts_share_task_id() -> None:
    ids = [
        read_comparison(row(prompt=prompt, chosen=chosen, rejected="z")).task_id
        for prompt, chosen in (("a", "b"), ("a", "c"), ("d", "b"))
    ]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"prompt": "a", "chosen": "b"}, "task preference needs"),
        ({"messages": [USER, SAID]}, "task preference needs"),
        ({"chosen": "b", "rejected": "c"}, "begin differently"),
        ({"chosen": [SAID], "rejected": [WRONG]}, "begin differently"),
        ({"chosen": [USER, SAID], "rejected": "c"}, "must both be text or both be lists"),
        ({"chosen": 1, "rejected": 1}, "must both be text or both be lists"),
        ({"prompt": [USER], "chosen": [SAID], "rejected": [USER]}, "'rejected' must begin"),
        ({"prompt": [USER], "chosen": [SAID], "rejected": [WRONG], "digest": "0"}, "is missing"),
    ],
)
def test_comparison_rejects_invalid_rows(value: dict[str, Any], error: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_comparison(row(**value))
    assert error in caught.value.what and caught.value.where == "chats.jsonl:7"


@pytest.mark.parametrize("to", ["records", "openai", "sharegpt"])
def test_demonstration_reads_every_format_of_convert(to: Any, tmp_path: Path) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    chat = [
        USER, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "4"}, SAID,
    ]  # fmt: skip
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    report = convert_files([tmp_path / "chats.jsonl"], to, tmp_path / "out.jsonl", ImportDefaults(score=1.0))
    assert report["written"] == 1
    (written,) = read_rows(tmp_path / "out.jsonl")
    conversation = read_demonstration(written)
    assert isinstance(conversation, Conversation)
    assert conversation.opening == (USER,) and len(conversation.turns) == 3 and conversation.turns[-1] == SAID
