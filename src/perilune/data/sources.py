"""Read rows of the user's own data files: JSON Lines, JSON, CSV, Parquet, and folders that `datasets` saved.

Rows are read in order and one batch at a time, so memory does not grow with the file, except for a JSON list.
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from perilune.data.lines import HEAD_BYTES, read_lines
from perilune.errors import RequestError
from perilune.files import (
    BOM,
    MAX_FILE_BYTES,
    detect_wrong_format,
    open_regular,
    parse_strict_json,
    read_json,
    read_regular,
)

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
OWN_FILES = ("records.jsonl", "preferences.jsonl")  # what stages write
TRAIN_WORDS = frozenset({"train", "training"})  # words in file names, as `datasets` reads them
HELD_OUT_WORDS = frozenset({"validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"})
BATCH_ROWS = 256  # rows of a columnar file in memory at a time
MAX_FIELD_CHARACTERS = 1 << 24  # characters of a CSV field

# The columns that `perilune.data.examples` reads. Others, such as embeddings, stay on disk.
COLUMNS = frozenset(
    {"messages", "conversations", "prompt", "completion", "text", "chosen", "rejected"}
    | {"tools", "chat_template_kwargs"}
    | {"digest", "environment", "task_id", "score", "source", "seed", "provenance", "details"}
    | {"chosen_score", "rejected_score"}
)


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        place: "FILE:LINE" of JSON Lines, "FILE row NUMBER" of other files; numbers start at 1.
        value: its columns, without those that are null.
    """

    place: str
    value: dict[str, Any]


def find_source(path: Path) -> Path:
    """Return the file or folder with the training rows of `path`.

    For a folder, this is the training file that a stage or `perilune data filter` wrote there, the split
    `train` of a saved DatasetDict, or else the folder itself.

    Raises:
        RequestError: when there is nothing to read.
    """
    if not path.exists():
        remedy = "check the path; Perilune downloads no data, so load it with `datasets` and save_to_disk"
        raise RequestError("no such file or folder", where=str(path), remedy=remedy)
    if path.is_dir():
        files = [path / name for name in OWN_FILES if (path / name).is_file()]
        if files:
            return files[0]
        if (path / "filter.json").is_file():
            return find_source(path / "train.jsonl")
        if (path / "dataset_dict.json").is_file():
            return find_source(_train_split(path))
    _list_files(path)
    return path


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file or folder, in the order of file names.

    Raises:
        RequestError: naming the file, and the line or row that cannot be read.
    """
    for file in _list_files(find_source(path)):
        yield from _read_file(file)


def _train_split(folder: Path) -> Path:
    splits = read_json(folder / "dataset_dict.json")
    names = splits.get("splits") if isinstance(splits, dict) else None
    if isinstance(names, list) and "train" in names:
        return folder / "train"
    listed = ", ".join(str(folder / str(name)) for name in names) if isinstance(names, list) else ""
    what = "the saved datasets have no split 'train'"
    raise RequestError(what, where=str(folder), remedy=f"name the folder of one: {listed[:300]}")


def _list_files(path: Path) -> list[Path]:
    """Return the files of a source, in order; in a folder, those for training."""
    if not path.is_dir():
        return [path]
    if (path / "state.json").is_file():
        return _saved_files(path)
    files = [file for folder in (path, path / "data") for file in _data_files(folder)]
    if not files:
        kinds = ", ".join(f"*{suffix}" for suffix in SUFFIXES)
        raise RequestError("the folder has no data files", where=str(path), remedy=f"add one of: {kinds}")
    chosen = [file for file in files if _name_words(file) & TRAIN_WORDS or file.name.startswith("train")]
    chosen = chosen or [file for file in files if not is_held_out(file)]
    if not chosen:
        names = ", ".join(file.name for file in files)[:300]
        what = f"the folder has only held-out files, by their names: {names}"
        raise RequestError(what, where=str(path), remedy="name one file to train on it")
    if len({file.suffix for file in chosen}) > 1:
        what = f"the folder has files of several kinds: {', '.join(file.name for file in chosen)[:300]}"
        raise RequestError(what, where=str(path), remedy="name one file")
    return chosen


def is_held_out(file: Path) -> bool:
    """Return whether a file is for evaluation by its name, such as test-00000-of-00001.parquet."""
    return bool(_name_words(file) & HELD_OUT_WORDS) and not _name_words(file) & TRAIN_WORDS


def _name_words(file: Path) -> set[str]:
    return set(re.split(r"[-._ 0-9]+", file.name.lower()))


def _data_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*") if file.suffix in SUFFIXES and file.is_file())


def _saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a folder that `Dataset.save_to_disk` wrote."""
    state = read_json(folder / "state.json")
    entries = state.get("_data_files") if isinstance(state, dict) else None
    entries = entries if isinstance(entries, list) else []
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise RequestError("does not list the files of a saved dataset", where=str(folder / "state.json"))
    return [folder / str(name) for name in names]


def _read_file(file: Path) -> Iterator[Row]:
    try:
        with open_regular(file) as opened:
            head = opened.read(HEAD_BYTES)
    except OSError as error:
        raise RequestError(f"cannot be read: {error.strerror}", where=str(file)) from None
    if head.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):
        return _read_columnar(file, head)
    starts = head.removeprefix(BOM).lstrip()
    if starts.startswith(b"["):
        return _read_array(file)
    if problem := detect_wrong_format(head):
        raise RequestError(problem[0], where=str(file), remedy=problem[1])
    delimiter = _find_delimiter(starts)
    if delimiter is None and file.suffix in (".csv", ".tsv"):
        what = f"the first line names no column that Perilune reads: {_first_line(starts)[:200]}"
        raise RequestError(
            what if starts else "the file is empty",
            where=f"{file}:1",
            remedy="name the columns in the first line, such as prompt,completion",
        )
    if delimiter is None:
        return _read_lines(file)
    return _read_csv(file, delimiter, spaced=f"{delimiter} " in _first_line(starts))


def _read_lines(file: Path) -> Iterator[Row]:
    for number, _, raw, problem in read_lines(file):
        place = f"{file}:{number}"
        if problem:
            raise RequestError(problem, where=place)
        try:
            value = parse_strict_json(raw)
        except ValueError as error:
            remedy = "write one object in each line, or one list of objects, in UTF-8"
            raise RequestError(f"not valid JSON: {error}", where=place, remedy=remedy) from None
        yield _make_row(place, value)


def _read_array(file: Path) -> Iterator[Row]:
    if file.stat().st_size > MAX_FILE_BYTES:
        what = f"a JSON list of more than {MAX_FILE_BYTES:,} bytes"
        remedy = "convert it to JSON Lines: jq -c '.[]' OLD.json > NEW.jsonl"
        raise RequestError(what, where=str(file), remedy=remedy)
    try:
        values = parse_strict_json(read_regular(file).removeprefix(BOM))
    except ValueError as error:
        raise RequestError(f"not valid JSON: {error}", where=str(file)) from None
    for number, value in enumerate(values, start=1):
        yield _make_row(f"{file} row {number}", value)


def _find_delimiter(starts: bytes) -> str | None:
    """Return the delimiter of a CSV file whose header names a column of `COLUMNS`; None for other files."""
    header = _first_line(starts)
    for delimiter in () if starts.startswith(b"{") else (",", "\t", ";"):
        if COLUMNS.intersection(next(csv.reader([header], delimiter=delimiter), [])):
            return delimiter
    return None


def _first_line(starts: bytes) -> str:
    return b"".join(starts.splitlines()[:1]).decode(errors="replace")


def _read_csv(file: Path, delimiter: str, *, spaced: bool) -> Iterator[Row]:
    """Read a CSV file. With `spaced`, spaces after delimiters are dropped."""
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    with open_regular(file) as opened, io.TextIOWrapper(opened, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True, skipinitialspace=spaced)
        rows = filter(None, reader)  # without blank lines
        number = 0
        try:
            header = [name.strip() for name in next(rows)]
            if len(set(header)) < len(header):
                raise ValueError("two columns have the same name")
            for fields in rows:
                if len(fields) != len(header):
                    raise ValueError(f"{len(fields)} values for {len(header)} columns")
                number += 1
                yield Row(f"{file} row {number}", dict(zip(header, fields, strict=True)))
        except UnicodeDecodeError:
            remedy = "save it as CSV UTF-8, or convert it: iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW"
            raise RequestError("not UTF-8 text", where=str(file), remedy=remedy) from None
        except (csv.Error, ValueError) as error:
            raise RequestError(f"not valid CSV: {error}", where=f"{file} row {number + 1}") from None


def _make_row(place: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise RequestError("a row must be a JSON object", where=place)
    return Row(place, {name: item for name, item in value.items() if item is not None})


def _read_columnar(file: Path, head: bytes) -> Iterator[Row]:
    import pyarrow

    number = 0
    try:
        for values in _read_batches(file, head):
            for value in values:
                number += 1
                yield Row(f"{file} row {number}", _drop_nulls(value))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise RequestError(f"cannot be read after row {number}: {reason}", where=str(file)) from None


def _read_batches(file: Path, head: bytes) -> Iterator[Sequence[dict[str, Any]]]:
    """Batches of rows of a Parquet file, an Arrow file or an Arrow stream. The contents are not trusted."""
    import pyarrow
    import pyarrow.parquet

    if head.startswith(b"PAR1"):
        with pyarrow.parquet.ParquetFile(file) as parquet:
            names = [name for name in parquet.schema_arrow.names if name in COLUMNS]
            for batch in parquet.iter_batches(BATCH_ROWS, columns=names):
                yield batch.to_pylist()
        return
    with pyarrow.memory_map(str(file)) as mapped:
        is_stream = not head.startswith(b"ARROW1")
        reader = pyarrow.ipc.open_stream(mapped) if is_stream else pyarrow.ipc.open_file(mapped)
        batches = reader if is_stream else (reader.get_batch(n) for n in range(reader.num_record_batches))
        for batch in batches:
            batch.validate(full=True)  # offsets of a hostile file could lead out of its memory
            chosen = batch.select([name for name in batch.schema.names if name in COLUMNS])
            for start in range(0, chosen.num_rows, BATCH_ROWS):
                yield chosen.slice(start, BATCH_ROWS).to_pylist()


def _drop_nulls(value: Any) -> Any:
    """Return a value without null fields: columnar files write a null for each field that a row lacks."""
    if isinstance(value, dict):
        return {name: _drop_nulls(item) for name, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def read_first_row(path: Path) -> Row:
    """Return the first row of a source.

    Raises:
        RequestError: when the source cannot be read, or has no rows.
    """
    for row in islice(read_rows(path), 1):
        return row
    raise RequestError("there are no rows", where=str(path))
