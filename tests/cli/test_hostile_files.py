"""Commands and readers refuse user files that block, never end, or are not strict JSON."""

import json
import os

import pytest

from perilune.data.records import TraceRecord, read_records, write_records
from perilune.data.sources import read_rows
from perilune.data.stream import stream_lines
from perilune.errors import RequestError
from perilune.files import parse_strict_json, read_json_lines

RECIPE = """\
name: sums
model: {preset: tiny}
environment: {id: jsonl, path: sums.jsonl, match: null}
rewards: {box: {function: "mine.py:one"}}
stages:
  - {name: base, task: evaluate, checkpoint: model}
"""
COMMANDS = (
    "run FILE --plan", "run FILE.yaml --plan", "environments audit FILE.yaml", "data inspect FILE",
    "data convert FILE --to records --out out.jsonl", "data filter FILE --out out",
    "environments replay FILE",
    "run sums.yaml --plan --set environment.path=FILE",
    "run sums.yaml --plan --set environment.heldout.path=FILE",
    "run sums.yaml --plan --set environment.path=folder",
    "run sums.yaml --plan --set rewards.box.function=FILE.py:one",
    "run sums.yaml --plan --set model.chat_template=FILE",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    rows = [{"prompt": f"{a} + {a}?", "answer": 2 * a} for a in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text("def one(completions, **columns):\n    return [1.0]\n")
    (tmp_path / "sums.yaml").write_text(RECIPE)
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "pipe.yaml", "pipe.py", "folder/rows.jsonl"):
        os.mkfifo(tmp_path / name)
    for ending in ("", ".yaml", ".py"):
        (tmp_path / f"endless{ending}").symlink_to("/dev/zero")
    return tmp_path


@pytest.mark.timeout(120)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("file", ["pipe", "endless"])
def test_commands_refuse_pipes_and_devices(file, command, folder, here):
    refused = here(*command.replace("FILE", file).split())
    assert refused.returncode == 2 and "regular file" in refused.stderr, refused.stderr


def test_commands_refuse_oversized_files(folder, here):
    (folder / "long.yaml").write_text("#" * (1 << 20))
    (folder / "long.py").write_text("#" * (2 << 20))
    for command in ("run long.yaml --plan", "run sums.yaml --plan --set rewards.box.function=long.py:one"):
        refused = here(*command.split())
        assert refused.returncode == 2 and "larger than" in refused.stderr


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": 1, "a": 2}', "'a' occurs twice"), ('[{"b": {"c": 1, "c": 1}}]', "'c' occurs twice"),
        ("1e400", "beyond the range"), ("[-1e999]", "beyond the range"), ("NaN", "NaN is not"),
        ("[-Infinity]", "Infinity is not"), (r'"\ud800"', "surrogate"), (r'{"\uDFFF": 1}', "surrogate"),
        ("[" * 100_000, "too deeply"), ('{"a": }', "Expecting value"), ("1" * 5000, "digits"),
    ],
)  # fmt: skip
def test_readers_refuse_rows_that_are_not_strict_json(text, why, tmp_path):
    with pytest.raises(ValueError, match=why):
        parse_strict_json(text.encode())
    file = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    record = TraceRecord(messages, environment="sums", task_id="1", score=1.0, source="hand", seed=0)
    write_records(file, [record])
    assert read_records(file) == [record]
    row = file.read_text()[:-2]
    file.write_text(f'{row},"details":{{"x":{text}}}}}\n')
    with pytest.raises(RequestError, match="not valid JSON"):
        read_records(file)
    (line,) = stream_lines(file)
    assert line.record is None and "not valid JSON" in line.problem
    with pytest.raises(RequestError, match="not valid JSON"):
        list(read_rows(file))


def test_strict_json_reads_valid_json():
    text = r'{"a": [1, 2.5, -3e7, true, null, "\u00e9\ud83d\ude00"], "b": {"a": 1}}'
    assert parse_strict_json(text.encode()) == json.loads(text)
    with pytest.raises(ValueError, match="UTF-8"):
        parse_strict_json(b'"\xff"')


def test_json_lines_reader_refuses_pipes_and_deep_nesting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep").write_text("[" * 100_000 + "\n")
    for name, why in (("pipe", "not a regular file"), ("deep", "not valid JSON")):
        with pytest.raises(RequestError, match=why):
            list(read_json_lines(tmp_path / name))
