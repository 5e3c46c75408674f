"""Rows are read in order from every file type, and errors name the place of an invalid row."""

import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from perilune.data.examples import read_demonstration
from perilune.data.lines import MAX_LINE_BYTES, read_lines
from perilune.data.sources import find_source, read_first_row, read_rows
from perilune.errors import RequestError
from perilune.files import MAX_FILE_BYTES, write_json

ROWS = [
    {"messages": [{"role": "user", "content": f"{n}é?"}, {"role": "assistant", "content": f"{n}\u2028!"}]}
    for n in range(600)
]


def write_lines(path: Path) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in ROWS), encoding="utf-8")
    return path


def write_array(path: Path) -> Path:
    path.write_text("\ufeff " + json.dumps(ROWS, indent=1), encoding="utf-8")
    return path


def write_parquet(path: Path) -> Path:
    table = pa.Table.from_pylist([{**row, "embedding": [1.0, float("nan")], "tools": None} for row in ROWS])
    pq.write_table(table, path, row_group_size=100)
    return path


def write_saved_dataset(path: Path) -> Path:
    """A folder as `Dataset.save_to_disk` writes it: Arrow streams, and their order in state.json."""
    path.mkdir(parents=True)
    names = []
    for part, start in enumerate(range(0, len(ROWS), 300)):
        table = pa.Table.from_pylist(ROWS[start : start + 300])
        names.append(f"data-{1 - part:05d}-of-00002.arrow")  # the order is that of the list, not of the names
        with pa.OSFile(str(path / names[-1]), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=130)
    write_json(path / "state.json", {"_data_files": [{"filename": name} for name in names], "_split": None})
    write_json(path / "dataset_info.json", {})
    return path


def write_dataset_dict(path: Path) -> Path:
    write_saved_dataset(path / "train")
    write_saved_dataset(path / "test")
    write_json(path / "dataset_dict.json", {"splits": ["train", "test"]})
    return path


def write_arrow_file(path: Path) -> Path:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=77)
    return path


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_lines, "chats.jsonl"), (write_array, "chats.json"), (write_parquet, "chats.parquet"),
        (write_arrow_file, "chats.arrow"), (write_saved_dataset, "saved"), (write_dataset_dict, "splits"),
    ],
)  # fmt: skip
def test_read_rows_reads_equal_rows_from_every_file_type(write, name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name)
    rows = list(read_rows(path))
    assert [row.value for row in rows] == ROWS
    assert len({row.place for row in rows}) == len(ROWS)
    if path.is_file():  # a bundle keeps no suffix
        bare = path.rename(tmp_path / "data")
        assert [row.value for row in read_rows(bare)] == ROWS


def test_read_rows_gives_line_or_row_number(tmp_path: Path) -> None:
    lines, table = write_lines(tmp_path / "a.jsonl"), write_parquet(tmp_path / "a.parquet")
    assert list(read_rows(lines))[2].place == f"{lines}:5"  # every other line is blank
    assert list(read_rows(table))[2].place == f"{table} row 3"


PAIRS = [{"prompt": f'{n} "and"\nmore, é', "completion": str(n), "note": ""} for n in range(40)]


@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
def test_read_rows_reads_csv_columns_from_header(delimiter: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        file.write("\n")
        writer = csv.DictWriter(file, PAIRS[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(PAIRS)
    path.write_bytes(path.read_bytes() + b"\r\n\r\n")
    rows = list(read_rows(path))
    assert [row.value for row in rows] == PAIRS and rows[2].place == f"{path} row 3"
    bare = path.rename(tmp_path / "data")  # a bundle keeps no suffix
    assert [row.value for row in read_rows(bare)] == PAIRS


@pytest.mark.parametrize(
    ("content", "error", "row"),
    [
        (b"prompt,completion\na,b\nc\n", "1 values for 2 columns", 2),
        (b'prompt,completion\na,"b\n', "unexpected end of data", 1),
        (b"prompt,completion\na," + b"b" * (17 << 20), "larger than field limit", 1),
        (b"prompt,prompt\na,b\n", "two columns have the same name", 1),
    ],
)
def test_read_rows_names_row_of_invalid_csv(content: bytes, error: str, row: int, tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_bytes(content)
    with pytest.raises(RequestError) as caught:
        list(read_rows(path))
    assert error in caught.value.what and caught.value.where == f"{path} row {row}"


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ("prompt, completion\n2+2, 4\n", "4"),
        ('"prompt", "completion"\n"2+2", "4, or 5"\n', "4, or 5"),
        (" prompt\tcompletion \n2+2\t 4\n", " 4"),  # no space after the delimiter: values keep theirs
        ("prompt,completion\n2+2, 4\n", " 4"),
    ],
)
def test_spaces_around_names_of_csv_columns_are_ignored(content: str, answer: str, tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text(content)
    (row,) = read_rows(tmp_path / "pairs.csv")
    assert row.value == {"prompt": "2+2", "completion": answer}


@pytest.mark.parametrize("header", ["question,answer", "2 + 3?,5", '"2, 3","5"', "2 + 3"])
def test_read_rows_rejects_csv_without_known_column(header: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text(f"{header}\n4 + 4?,8\n")
    with pytest.raises(RequestError, match="the first line names no column") as caught:
        list(read_rows(path))
    assert caught.value.where == f"{path}:1" and header in caught.value.what
    assert "prompt,completion" in caught.value.remedy
    path.write_text("")
    with pytest.raises(RequestError, match="the file is empty"):
        list(read_rows(path))


def test_read_rows_says_how_to_convert_large_json_list(tmp_path: Path) -> None:
    with (tmp_path / "chats.json").open("wb") as file:
        file.write(b"[")
        file.truncate(MAX_FILE_BYTES + 1)  # takes no space
    with pytest.raises(RequestError, match="a JSON list of more than") as caught:
        list(read_rows(tmp_path / "chats.json"))
    assert "jq -c" in caught.value.remedy


def test_csv_with_messages_in_python_notation_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "chats.csv"
    path.write_text("messages\n\"[{'role': 'user', 'content': 'a'}]\"\n")
    with pytest.raises(RequestError, match="not a list of messages") as caught:
        read_demonstration(*read_rows(path))
    assert "in a CSV file, the same as JSON text" in caught.value.remedy


def test_read_rows_says_how_to_convert_csv_in_other_encoding(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_bytes("prompt,completion\ncaf\u00e9,b\n".encode("cp1252"))
    with pytest.raises(RequestError, match="not UTF-8 text") as caught:
        list(read_rows(path))
    assert caught.value.where == str(path) and "iconv" in caught.value.remedy


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (gzip.compress(b'{"text": "a"}\n', mtime=0), "is compressed"),
        ('{"text": "a"}\n'.encode("utf-16"), "is UTF-16"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a Git LFS pointer"),
    ],
)
def test_read_rows_rejects_files_of_wrong_format(data: bytes, error: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(RequestError, match=error) as caught:
        list(read_rows(tmp_path / "a.jsonl"))
    assert caught.value.remedy


def test_read_lines_keeps_line_after_too_long_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"a" * MAX_LINE_BYTES + b'\n{"text": "b"}\n')
    assert [(number, bool(problem)) for number, _, _, problem in read_lines(path)] == [(1, True), (2, False)]


def test_read_rows_uses_training_files_of_folder(tmp_path: Path) -> None:
    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    write_parquet(hub / "train-00000-of-00001.parquet")
    (hub / "test-00000-of-00001.parquet").write_bytes(b"PAR1 is not read")
    assert len(list(read_rows(tmp_path / "hub"))) == len(ROWS)

    clean = tmp_path / "clean"
    clean.mkdir()
    write_lines(clean / "train.jsonl")
    for name in ("rejected.jsonl", "validation.jsonl", "filter.json"):
        (clean / name).write_text("{}\n")
    assert find_source(clean) == clean / "train.jsonl"
    assert find_source(write_dataset_dict(tmp_path / "splits")) == tmp_path / "splits" / "train"


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (["a", "b", "test"], ["a", "b"]),
        (["a", "validation-00000-of-00001", "my_test", "eval.set"], ["a"]),
        (["train-0", "train-1", "a", "test"], ["train-0", "train-1"]),
        (["sums.train", "sums.dev"], ["sums.train"]),
        (["contest", "latest"], ["contest", "latest"]),
    ],
)
def test_read_rows_skips_files_named_for_evaluation(
    names: list[str], read: list[str], tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    assert [row.value["text"] for row in read_rows(tmp_path)] == read


def test_read_rows_drops_null_columns_and_fields(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "messages": null}\n')
    assert read_first_row(path).value == {"text": "a"}
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    rows = [
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}], "tools": None},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": None}], "tools": "[]"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second = (row.value for row in read_rows(tmp_path / "a.parquet"))
    assert first == {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    assert second == {"messages": [{"role": "assistant", "content": "x"}], "tools": "[]"}


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b'{"text": NaN}', "NaN is not a JSON number"),
        (b'{"text": "\xff\xfe"}', "not UTF-8"),
        (b'{"text": "\\ud800"}', "surrogate"),
        (b'{"text": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"text": "a", "text": "b"}', "occurs twice"),
        (b'"text"', "a row must be a JSON object"),
        (b'{"text": "' + b"a" * (17 << 20) + b'"}', "longer than"),
        (b'{"text": "cut', "not valid JSON"),
    ],
)
def test_read_rows_names_line_of_invalid_json(content: bytes, error: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' + content + b"\n")
    with pytest.raises(RequestError) as caught:
        list(read_rows(path))
    assert error in caught.value.what and caught.value.where == f"{path}:3"


def test_read_rows_rejects_damaged_parquet_and_arrow_files(tmp_path: Path) -> None:
    whole = write_parquet(tmp_path / "whole.parquet").read_bytes()
    arrow = write_arrow_file(tmp_path / "whole.arrow").read_bytes()
    for name, data in {
        "cut.parquet": whole[: len(whole) // 2],
        "empty.parquet": b"PAR1",
        "bent.parquet": whole[:2000] + bytes(2000) + whole[4000:],
        "cut.arrow": arrow[: len(arrow) // 2],
        "stream.arrow": b"\xff\xff\xff\xff" + bytes(64),
    }.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(RequestError, match="cannot be read after row"):
            list(read_rows(tmp_path / name))


def test_read_rows_rejects_arrow_offsets_outside_file(tmp_path: Path) -> None:
    table = pa.table({"text": pa.array(["abcdefgh"] * 50)})
    path = tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    data = path.read_bytes()
    offsets = b"".join((8 * n).to_bytes(4, "little") for n in range(51))
    assert offsets in data
    far = offsets[:100] + (1 << 30).to_bytes(4, "little") + offsets[104:]
    path.write_bytes(data.replace(offsets, far))
    with pytest.raises(RequestError, match="cannot be read"):
        list(read_rows(path))


def test_find_source_explains_unusable_folders(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such file"):
        find_source(tmp_path / "none")
    with pytest.raises(RequestError, match="no data files") as caught:
        find_source(tmp_path)
    assert "*.jsonl, *.json, *.csv" in caught.value.remedy
    write_lines(tmp_path / "test.jsonl")
    with pytest.raises(RequestError, match=r"only held-out files.*test\.jsonl"):
        find_source(tmp_path)
    write_lines(tmp_path / "a.jsonl")
    write_parquet(tmp_path / "a.parquet")
    with pytest.raises(RequestError, match="several kinds"):
        find_source(tmp_path)
    saved = write_saved_dataset(tmp_path / "saved")
    for entries in ([{"filename": "../a.jsonl"}], 5):
        write_json(saved / "state.json", {"_data_files": entries})
        with pytest.raises(RequestError, match="does not list"):
            find_source(saved)
    splits = write_dataset_dict(tmp_path / "splits")
    write_json(splits / "dataset_dict.json", {"splits": ["test", "validation"]})
    with pytest.raises(RequestError, match="no split 'train'") as caught:
        find_source(splits)
    assert str(splits / "test") in caught.value.remedy
