"""Chat formats: round trips preserve messages, and errors name content that a record cannot hold."""

import errno
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from perilune.cli.data.records import app
from perilune.data.chat_format import from_openai, from_sharegpt, to_openai, to_sharegpt
from perilune.data.conversion import ImportDefaults, convert_files
from perilune.data.records import Provenance, TraceRecord, read_records, to_row, write_records
from perilune.errors import RequestError, WorkFailedError
from perilune.files import write_json_lines

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
CALL = st.fixed_dictionaries({"name": st.text(), "arguments": st.dictionaries(st.text(), JSON, max_size=3)})
SCRAPS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "\n", "<tool_call>\n", "\n</tool_call>", "{}", '{"name": "x"}', "hello",
     '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', '{"name": "f", "arguments":{}}', " "]
)  # fmt: skip
TEXT = st.text() | st.lists(SCRAPS, max_size=6).map("".join)


def block(call):
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


CALLING = st.tuples(st.text(), st.lists(CALL, min_size=1, max_size=3)).map(
    lambda made: "\n".join([*([made[0]] if made[0] else []), *map(block, made[1])])
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "assistant", "tool"]),
            "content": TEXT | CALLING,
        }
    ),
    max_size=8,
)


@given(MESSAGES)
@settings(max_examples=120, deadline=None)
def test_openai_and_sharegpt_round_trips_preserve_messages(messages):
    written = json.loads(json.dumps(to_openai(messages)))
    assert from_openai(written) == messages
    assert to_openai(from_openai(written)) == written
    assert from_sharegpt(json.loads(json.dumps(to_sharegpt(messages)))) == messages


@pytest.mark.parametrize("text", ["no", block({"name": "f", "arguments": {}})])
def test_conversions_keep_messages_that_are_not_learned(text):
    asked = {"role": "user", "content": "?"}
    messages = [
        asked,
        {"role": "assistant", "content": text, "weight": 0},
        asked,
        {"role": "assistant", "content": "2"},
    ]
    written = to_openai(messages)
    assert from_openai(written) == from_sharegpt(to_sharegpt(messages)) == messages
    assert from_openai([*written[:-1], {**written[-1], "weight": 1}]) == messages
    with pytest.raises(RequestError, match="a weight other than 0 and 1"):
        from_openai([*written[:-1], {**written[-1], "weight": 0.5}])


@st.composite
def agents(draw):
    """Messages as an API returns them: tool calls with ids, and results in any order."""
    messages, count = [{"role": "user", "content": draw(st.text())}], 0
    for _ in range(draw(st.integers(1, 3))):
        calls = draw(st.lists(CALL, min_size=1, max_size=3))
        ids = [f"call_{count + index}" for index in range(len(calls))]
        count += len(calls)
        asked = [
            {"id": i, "type": "function", "function": {**c, "arguments": json.dumps(c["arguments"])}}
            for i, c in zip(ids, calls, strict=True)
        ]
        messages.append(
            {"role": "assistant", "content": draw(st.none() | st.text(min_size=1)), "tool_calls": asked}
        )
        results = [{"role": "tool", "tool_call_id": i, "content": draw(st.text())} for i in ids]
        messages += draw(st.permutations(results))
    return [*messages, {"role": "assistant", "content": draw(st.text())}]


def sorted_by_call(messages):
    """The messages with results sorted by call, and arguments parsed."""
    copies = [dict(message) for message in messages]
    for message in copies:
        for call in message.get("tool_calls", ()):
            call["function"] = {**call["function"], "arguments": json.loads(call["function"]["arguments"])}
    return sorted(copies[:-1], key=lambda m: (m.get("tool_call_id") or "", m["role"])) + copies[-1:]


@given(agents())
@settings(max_examples=50, deadline=None)
def test_openai_round_trip_preserves_ids_of_calls_and_results(messages):
    again = json.loads(json.dumps(to_openai(from_openai(json.loads(json.dumps(messages))))))
    assert sorted_by_call(again) == sorted_by_call(json.loads(json.dumps(messages)))
    roles = [message["role"] for message in again]
    assert roles == [message["role"] for message in messages]


def test_from_openai_writes_tool_calls_as_text():
    asked = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":2}'}}
    conversation = [
        {"role": "developer", "content": "Count."},
        {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "2?"}]},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [asked], "refusal": None},
        {"role": "tool", "tool_call_id": "a", "name": "add", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]
    answer = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    assert from_openai(conversation) == [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": answer},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]
    shared = [
        {"from": "human", "value": "1+2?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1, "b": 2}}'},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "3"},
    ]
    roles = [message["role"] for message in from_sharegpt(shared)]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert to_openai(from_sharegpt(shared))[1]["tool_calls"][0]["function"]["name"] == "add"


def assistant_calls(*ids, **function):
    return {
        "role": "assistant",
        "tool_calls": [{"id": i, "function": {"name": "f", "arguments": "{}"} | function} for i in ids],
    }


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ("hello", "messages is not a list"),
        (["hello"], r"messages\[0\] is not a message"),
        ([{"role": "robot", "content": ""}], r"messages\[0\] has the role 'robot'"),
        ([{"role": "user", "content": 3}], "content that is not text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "content that is not text"),
        ([{"role": "user", "content": "x", "audio": {"id": 1}}], "has audio, which a record cannot hold"),
        ([assistant_calls("a", arguments="{")], "arguments that are not a JSON object"),
        ([assistant_calls("a", arguments="[1]")], "arguments that are not a JSON object"),
        ([assistant_calls("a", name=None)], "is not a call with name and arguments"),
        ([assistant_calls("a", "a")], "two calls with the same id"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom"}]}], "a call that is not of a function"),
        ([{"role": "tool", "tool_call_id": "b", "content": ""}], "answers no open call"),
        (
            [assistant_calls("a"), *[{"role": "tool", "tool_call_id": "a", "content": ""}] * 2],
            "answers no open call",
        ),
        (
            [assistant_calls("a", "b"), {"role": "tool", "tool_call_id": "b", "content": ""}],
            "a call has no result",
        ),
    ],
)
def test_from_openai_rejects_messages_that_record_cannot_hold(messages, error):
    with pytest.raises(RequestError, match=error):
        from_openai(messages)


@pytest.mark.parametrize(
    ("turns", "error"),
    [
        (None, "conversations is not a list"),
        ([{"from": "gpt"}], "is not a turn with a value"),
        ([{"from": "bing", "value": ""}], "is from 'bing'"),
        ([{"from": "function_call", "value": "add(1, 2)"}], "not a JSON object"),
        ([{"from": "function_call", "value": "{}"}], "is not a call with name and arguments"),
    ],
)
def test_from_sharegpt_rejects_invalid_turns(turns, error):
    with pytest.raises(RequestError, match=error):
        from_sharegpt(turns)


RECORDS = [
    TraceRecord(
        [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": text}],
        environment="e", task_id=f"t{n}", score=0.5, source="s/x", seed=n,
        provenance=Provenance("s", "1", "ab") if n else None, details={"n": n} if n else None,
    )
    for n, text in enumerate(["1", block({"name": "f", "arguments": {}}), "3"])
]  # fmt: skip


@pytest.mark.parametrize("form", ["openai", "sharegpt", "records"])
def test_convert_files_round_trip_is_byte_identical(tmp_path, form):
    write_records(tmp_path / "a.jsonl", RECORDS)
    for source, to, out in (("a", form, "b"), ("b", "records", "c")):
        report = convert_files([tmp_path / f"{source}.jsonl"], to, tmp_path / f"{out}.jsonl")
        assert report == {"read": 3, "written": 3, "rejected": {}}
    assert (tmp_path / "c.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()
    first = json.loads((tmp_path / "b.jsonl").read_text().splitlines()[1])
    assert ("conversations" in first) == (form == "sharegpt")
    assert (form == "openai") == bool(first.get("messages", [{}])[-1].get("tool_calls"))


def test_convert_files_lists_rejected_rows_with_file_line_and_reason(tmp_path):
    path = tmp_path / "chats.jsonl"
    fine = {
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}],
        "lang": "en",
    }
    unfinished = {"messages": fine["messages"][:1]}
    rows = [
        fine,
        {"text": "x"},
        {"messages": "x"},
        unfinished,
        {"digest": "0"},
        {"messages": [], "conversations": []},
        {**fine, "details": ["x"]},
        {"conversations": [{"from": ["gpt"], "value": "4"}]},
        {**fine, "score": 10**400},
        {**to_row(RECORDS[0]), "messages": [{"role": ["user"], "content": "x"}]},
    ]
    text = "\n".join([*map(json.dumps, rows), '{"messages": [', "[" * 100_000]) + "\n"
    path.write_text(text, encoding="utf-8-sig")
    report = convert_files([path], "records", tmp_path / "out.jsonl", ImportDefaults(score=1.0))
    (record,) = read_records(tmp_path / "out.jsonl")
    assert (record.environment, record.source, record.score, record.details) == (
        "chat", "imported", 1.0, {"lang": "en"},
    )  # fmt: skip
    aside = [json.loads(line) for line in (tmp_path / "out.rejected.jsonl").read_text().splitlines()]
    assert [row["line"] for row in aside] == list(range(2, 13))
    assert {row["file"] for row in aside} == {str(path)}
    reasons = [row["reason"] for row in aside]
    assert "does not end with the assistant" in reasons[2] and "not valid JSON" in reasons[9]
    assert reasons[5:9] == [
        "field 'details' is not an object",
        "conversations[0] is from ['gpt']",
        "field 'score' is not a finite number",
        "field 'messages[0]': role must be one of assistant, system, tool, user, and content text",
    ]
    assert report["read"] == 12 and report["written"] == 1 and sum(report["rejected"].values()) == 11
    report = convert_files([path], "records", tmp_path / "out.jsonl")
    assert report["written"] == 0 and "the row has no score; set one with --score" in report["rejected"]


@pytest.mark.parametrize(
    ("name", "data", "error"),
    [
        ("a.json", b'[{"messages": []}]', "a JSON list"),
        ("a.csv", b"prompt,completion\n", "a CSV file"),
        ("a.gz", b"\x1f\x8b", "compressed"),
        ("a", b"\xff\xfe{\0", "UTF-16"),
        ("absent", None, "no file absent"),
    ],
)
def test_convert_and_filter_refuse_files_of_other_formats(tmp_path, name, data, error):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    for command in ("convert", "filter"):
        options = [str(tmp_path / "out/x"), *(["--to", "openai"] if command == "convert" else [])]
        result = CliRunner().invoke(app, [command, str(tmp_path / name), "--out", *options])
        assert isinstance(result.exception, RequestError) and error in str(result.exception)
        assert not (tmp_path / "out").exists()


def test_convert_refuses_folder_as_output(tmp_path, monkeypatch):
    write_records(tmp_path / "a.jsonl", RECORDS)
    monkeypatch.chdir(tmp_path)
    for out in (Path(), tmp_path):
        with pytest.raises(RequestError, match="is a folder"):
            convert_files([tmp_path / "a.jsonl"], "openai", out)
    with pytest.raises(IsADirectoryError):
        write_json_lines(Path(), [])
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_convert_files_leaves_nothing_behind_when_it_fails(tmp_path, monkeypatch):
    write_records(tmp_path / "a.jsonl", RECORDS)

    def full(_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="full"):
        convert_files([tmp_path / "a.jsonl"], "openai", tmp_path / "b.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_convert_files_reports_at_most_100_reasons(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": [{"role": f"r{n}"}]}) + "\n" for n in range(300)))
    report = convert_files([path], "records", tmp_path / "out.jsonl")
    assert len(report["rejected"]) == 101 and report["rejected"]["others"] == 200 and report["read"] == 300


def test_convert_command_prints_rejected_rows(tmp_path):
    write_records(tmp_path / "a.jsonl", RECORDS)
    (tmp_path / "b.jsonl").write_text("{}\n")
    command = ["convert", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), "--to", "openai"]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "c.jsonl")], catch_exceptions=False)
    assert result.exit_code == 0 and "3 of 4 rows" in result.output
    assert "a row needs either messages or conversations" in result.output
    refused = CliRunner().invoke(app, [*command[:-1], "alpaca", "--out", str(tmp_path / "d")])
    assert refused.exit_code == 2 and "'alpaca' is not one of" in refused.output


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.rejected.jsonl"])
def test_convert_replaces_no_input(tmp_path, name):
    path = tmp_path / name
    path.write_text('{"messages": []}\n')
    with pytest.raises(RequestError, match="would be overwritten"):
        convert_files([path], "openai", tmp_path / "chats.jsonl")
    assert path.read_text() == '{"messages": []}\n'


def test_convert_command_fails_if_no_row_is_converted(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    arguments = [
        "convert",
        str(tmp_path / "in.jsonl"),
        "--to",
        "records",
        "--out",
        str(tmp_path / "out.jsonl"),
    ]
    with pytest.raises(WorkFailedError, match="no row was converted"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert (tmp_path / "out.rejected.jsonl").read_text().count("messages or conversations") == 1
