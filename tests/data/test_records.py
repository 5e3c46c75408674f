"""Trace records: reading, writing, errors with line and field, deduplication, and the split by task."""

import json
from dataclasses import asdict, replace

import pytest

from perilune.data.records import (
    Provenance,
    TraceRecord,
    deduplicate,
    is_validation,
    read_records,
    write_records,
)
from perilune.errors import RequestError


def record(question="1+2=", answer=";3", task_id="t1", **fields):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    values = {"environment": "e", "task_id": task_id, "score": 1.0, "source": "s/direct", "seed": 0}
    return TraceRecord(messages, **(values | fields))


RECORDS = [
    record(),
    record("2+2=", ";4", "t2"),
    record("é\n\u2028", ";x", "t3", score=0.5, provenance=Provenance("s", "1.0", "ab")),
]


def test_read_records_reads_file_and_folder(tmp_path):
    path = tmp_path / "records.jsonl"
    assert write_records(path, RECORDS) == 3
    assert read_records(path) == RECORDS
    assert read_records(tmp_path) == RECORDS
    assert set(json.loads(path.read_text().splitlines()[0])) == {
        "messages", "environment", "task_id", "score", "source", "seed", "digest", "provenance",
    }  # fmt: skip


def test_digest_depends_only_on_messages():
    assert record(seed=1, score=0.2, task_id="x").digest == record().digest
    assert record(answer=";4").digest != record().digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": None}, "field 'score' is None, not a finite number"),
        ({"score": True}, "field 'score'"),
        ({"score": float("inf")}, "Infinity is not a JSON number"),
        ({"seed": "0"}, "field 'seed' is '0', not an integer"),
        ({"task_id": ""}, "field 'task_id'"),
        ({"messages": []}, "field 'messages'"),
        ({"messages": "hello"}, "field 'messages'"),
        ({"messages": [{"role": "user"}]}, r"field 'messages\[0\]'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"field 'messages\[0\]'"),
        ({"messages": [{"role": "user", "content": 3}]}, r"field 'messages\[0\]'"),
        ({"messages": [{"role": "user", "content": "x"}]}, "does not end with the assistant"),
        ({"digest": "0" * 64}, "field 'digest' does not fit"),
        ({"extra": 1}, "unknown field 'extra'"),
        ({"provenance": {"generator": "x"}}, "field 'provenance' needs exactly generator, version and"),
        ({"provenance": {"generator": "x", "version": 1, "settings": "y"}}, "field 'provenance' needs"),
    ],
)
def test_read_records_names_file_line_and_field_of_invalid_row(tmp_path, change, message):
    path = tmp_path / "r.jsonl"
    write_records(path, RECORDS[:1])
    row = asdict(RECORDS[1]) | change
    with path.open("a") as file:
        file.write("\n" + json.dumps(row) + "\n")
    with pytest.raises(RequestError, match=message) as caught:
        read_records(path)
    assert caught.value.where == f"{path}:3"


def test_read_records_names_missing_field_invalid_json_and_missing_file(tmp_path):
    path = tmp_path / "r.jsonl"
    row = asdict(RECORDS[0])
    del row["source"]
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(RequestError, match="'source' is missing") as caught:
        read_records(path)
    assert caught.value.where == f"{path}:1"
    for broken in ('{"messages": [', "1", "\udcff".encode(errors="surrogatepass").decode("latin1")):
        path.write_text(broken + "\n")
        with pytest.raises(RequestError) as caught:
            read_records(path)
        assert caught.value.where == f"{path}:1"
    with pytest.raises(RequestError, match="no file absent"):
        read_records(tmp_path / "absent.jsonl")


def test_deduplicate_keeps_first_record_per_content_and_task():
    first = record()
    same_content = replace(record(), task_id="other")
    same_task = record(answer="12003;3")
    elsewhere = replace(record("5+5=", ";10"), environment="other")
    assert list(deduplicate([first, same_content, same_task, elsewhere])) == [first, elsewhere]


def test_validation_split_depends_only_on_task():
    names = [f"t{i}" for i in range(400)]
    held_out = [name for name in names if is_validation(name, 0.1)]
    assert 20 <= len(held_out) <= 65
    assert all(is_validation(name, 0.3) for name in held_out)  # a larger share only adds tasks
    assert not any(is_validation(name, 0.0) for name in names)


def test_read_records_accepts_rows_without_provenance(tmp_path):
    path = tmp_path / "r.jsonl"
    row = asdict(RECORDS[0])
    del row["provenance"]
    path.write_text(json.dumps(row) + "\n")
    assert read_records(path) == RECORDS[:1]
