"""An index of JSON Lines files: validates each row once, and reads a row again when it is needed.

The index takes 37 bytes per row, whatever the row's length, so millions of rows fit in memory.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from perilune.data.lines import MAX_LINE_BYTES, read_lines
from perilune.data.sources import is_held_out
from perilune.environments.core.matching import Match, unmatchable_reason
from perilune.environments.core.protocol import Message, Split
from perilune.errors import RequestError
from perilune.files import BOM, canonical_json, open_regular, parse_strict_json, sha256_bytes
from perilune.frozen import Frozen

ROLES = ("system", "user", "assistant", "tool")
RESERVED_COLUMNS = frozenset({"actions", "compact", "completions", "prompts", "task_id"})  # used elsewhere
BrokenRowPolicy = Literal["stop", "drop"]
"""The policy for invalid rows."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        location: FILE:LINE.
        task_id: digest of the prompt, 32 hex digits.
        prompt: the opening messages.
        data: all other columns; "answer", if present, as text.
    """

    location: str
    task_id: str
    prompt: tuple[Message, ...]
    data: Mapping[str, Any]


class InvalidRowError(ValueError):
    """An invalid row; the message gives the reason."""


class HeldOut(Frozen):
    """The held-out rows: a share of all, those that a column marks, or those of another file."""

    share: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="approximate share of rows that are held out, chosen by a digest of the prompt",
    )
    column: str | None = Field(
        None, description="instead of `share`: hold out the rows in which this column equals `value`"
    )
    value: str | bool = Field("test", description="value of `column` in held-out rows")
    path: str | None = Field(
        None,
        description="instead of `share`: file or folder with the held-out rows; all rows of the"
        " environment's `path` are then for training",
    )

    @model_validator(mode="after")
    def _require_one_rule(self) -> HeldOut:
        if self.column is not None and self.path is not None:
            raise ValueError("has both column and path; choose one")
        given = {
            name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default
        }
        if "value" in given and self.column is None:
            raise ValueError("has value without column; name the column")
        if "share" in given and given & {"column", "path"}:
            raise ValueError("has share, and column or path; choose one")
        return self

    def is_held_out(self, row: Row) -> bool:
        """Return whether a row of the file with all tasks is held out."""
        if self.column is None:
            return int(row.task_id[:8], 16) < self.share * (1 << 32)
        if self.column not in row.data:
            remedy = "add the column to every row, or change heldout.column"
            raise RequestError(f"has no column '{self.column}'", where=row.location, remedy=remedy)
        value = row.data[self.column]
        return type(value) is type(self.value) and value == self.value


@dataclass(eq=False)
class RowIndex:
    """The valid rows of some files, in reading order.

    Attributes:
        splits: row numbers of each split, uint32.
        characters: those of the questions and answers that are not all printable ASCII, each with the
            location of the first row that has it.
    """

    match: Match | None
    files: list[Path] = field(default_factory=list)
    splits: dict[Split, np.ndarray] = field(default_factory=dict)
    characters: dict[str, str] = field(default_factory=dict)
    _file: array[int] = field(default_factory=lambda: array("I"))
    _line: array[int] = field(default_factory=lambda: array("I"))
    _offset: array[int] = field(default_factory=lambda: array("Q"))
    _digests: bytearray = field(default_factory=bytearray)  # 16 bytes per row
    _held_out: bytearray = field(default_factory=bytearray)

    def row(self, number: int) -> Row:
        """Read a row again.

        Raises:
            RequestError: if the file has changed.
        """
        file = self.files[self._file[number]]
        try:
            with open_regular(file) as lines:
                lines.seek(self._offset[number])
                row = parse_row(lines.readline(MAX_LINE_BYTES + 1), self.location(number), self.match)
            unchanged = bytes.fromhex(row.task_id) == self._digests[16 * number : 16 * number + 16]
        except (OSError, InvalidRowError, RequestError):
            unchanged = False
        if not unchanged:
            raise RequestError("has changed since it was first read", where=self.location(number))
        return row

    def location(self, number: int) -> str:
        """Return FILE:LINE of a row."""
        return f"{self.files[self._file[number]]}:{self._line[number]}"

    def add(self, row: Row, line: int, offset: int, is_held_out: bool) -> None:
        """Record a valid row of the last of `files`."""
        self._file.append(len(self.files) - 1)
        self._line.append(line)
        self._offset.append(offset)
        self._digests += bytes.fromhex(row.task_id)
        self._held_out.append(is_held_out)
        for text in (*(message["content"] for message in row.prompt), row.data.get("answer", "")):
            if not (text.isascii() and text.isprintable()):
                for character in dict.fromkeys(text):
                    self.characters.setdefault(character, row.location)

    def find_repeated_prompts(self) -> list[tuple[int, int]]:
        """Return pairs of a row that repeats a prompt and the first row with that prompt, in order."""
        digests = np.frombuffer(self._digests, dtype=np.uint64).reshape(-1, 2)
        order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equal digests keep their order
        repeats = np.flatnonzero((digests[order][1:] == digests[order][:-1]).all(axis=1)) + 1
        firsts: dict[int, int] = {}
        for position in repeats:
            before = int(order[position - 1])
            firsts[int(order[position])] = firsts.get(before, before)
        return sorted(firsts.items())

    def build_splits(self, excluded: list[int]) -> None:
        """Compute `splits`, without the rows `excluded`."""
        included = np.ones(len(self._held_out), dtype=bool)
        included[excluded] = False
        held_out = np.frombuffer(self._held_out, dtype=np.uint8).astype(bool)
        self.splits = {
            "train": np.flatnonzero(included & ~held_out).astype(np.uint32),
            "heldout": np.flatnonzero(included & held_out).astype(np.uint32),
        }


def load_index(path: str, match: Match | None, broken_rows: BrokenRowPolicy, held_out: HeldOut) -> RowIndex:
    """Return the index of `path` (a file or a folder of *.jsonl) and the held-out rows.

    The index is cached until a file changes.

    Args:
        match: how answers are compared; None if rows need no answer.
        broken_rows: "stop" at the first invalid row, or "drop" all of them and log their number. A row that
            repeats an earlier prompt is invalid, too. The held-out file is read first, so a row in both files
            is missing from training.

    Raises:
        RequestError: if a file cannot be read, a path has no rows, or a row is invalid.
    """
    paths = [path] if held_out.path is None else [held_out.path, path]
    files = tuple(tuple(_list_files(Path(entry))) for entry in paths)
    if Path(path).is_dir() and held_out.path is None and held_out.column is None:
        _refuse_held_out(files[0])
    try:
        versions = tuple(
            (entry.stat().st_mtime_ns, entry.stat().st_size) for group in files for entry in group
        )
    except OSError as error:  # a link to nothing or to itself
        raise RequestError(f"cannot be read: {error.strerror}", where=str(error.filename)) from None
    return _build_index(files, versions, match, broken_rows, held_out)


@lru_cache(maxsize=2)
def _build_index(
    files: tuple[tuple[Path, ...], ...],
    versions: tuple[tuple[int, int], ...],
    match: Match | None,
    broken_rows: BrokenRowPolicy,
    held_out: HeldOut,
) -> RowIndex:
    index, rejected = RowIndex(match), _InvalidRows(broken_rows)
    is_separate = held_out.path is not None
    for group in files:
        before = len(index._held_out)
        for file in group:
            index.files.append(file)
            for line, offset, row in _read_rows(file, match, rejected):
                index.add(row, line, offset, group is files[0] if is_separate else held_out.is_held_out(row))
        if len(index._held_out) == before:
            what = f"has no valid rows; the first: {rejected.first}" if rejected.first else "has no tasks"
            raise RequestError(what, where=str(group[0].parent if len(group) > 1 else group[0]))
    repeated = index.find_repeated_prompts()
    for repeat, first in repeated:
        rejected.add(index.location(repeat), f"has the same prompt as {index.location(first)}")
    index.build_splits([repeat for repeat, _ in repeated])
    if rejected.count:
        total = rejected.count + sum(map(len, index.splits.values()))
        logging.getLogger(__name__).warning(
            "left out %d invalid rows of %d; the first: %s", rejected.count, total, rejected.first
        )
    return index


class _InvalidRows:
    """Applies the policy for invalid rows."""

    def __init__(self, policy: BrokenRowPolicy) -> None:
        self._policy = policy
        self.count, self.first = 0, ""

    def add(self, location: str, reason: str) -> None:
        if self._policy == "stop":
            remedy = "correct the row, or leave out invalid rows with broken_rows: drop"
            raise RequestError(reason, where=location, remedy=remedy)
        self.count += 1
        self.first = self.first or f"{location}: {reason}"


def _list_files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if not files:
            raise RequestError("the folder has no *.jsonl", where=str(path))
        yield from files
    elif path.is_file():
        yield path
    elif path.exists():
        raise RequestError("not a regular file", where=str(path), remedy="give a file, not a pipe or device")
    else:
        raise RequestError("no such file or folder", where=str(path))


def _refuse_held_out(files: Iterable[Path]) -> None:
    """Refuse to train on a file of a folder whose name says that it is for evaluation."""
    for file in files:
        if is_held_out(file):
            remedy = f"name files: path: FOLDER/train.jsonl, heldout: {{path: FOLDER/{file.name}}}"
            raise RequestError(
                f"the folder has a file for evaluation: {file.name}", where=str(file.parent), remedy=remedy
            )


def _read_rows(file: Path, match: Match | None, rejected: _InvalidRows) -> Iterator[tuple[int, int, Row]]:
    """Yield valid rows, each with its line number and byte offset."""
    for number, offset, raw, problem in read_lines(file):
        location = f"{file}:{number}"
        try:
            if problem:
                raise InvalidRowError(problem)
            row = parse_row(raw, location, match)
        except InvalidRowError as error:
            rejected.add(location, str(error))
        else:
            yield number, offset, row


def parse_row(raw: bytes, location: str, match: Match | None) -> Row:
    """Parse a line.

    Raises:
        InvalidRowError: if it is not a valid row.
    """
    try:
        row = parse_strict_json(raw.removeprefix(BOM))
    except ValueError as error:
        raise InvalidRowError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise InvalidRowError("not a JSON object")
    if reserved := RESERVED_COLUMNS & row.keys():
        raise InvalidRowError(f"the column name '{min(reserved)}' is reserved; rename it")
    prompt = _parse_prompt(row)
    data = {name: value for name, value in row.items() if name not in ("prompt", "messages")}
    if data.get("answer") is None:
        data.pop("answer", None)
    else:
        data["answer"] = _parse_answer(data["answer"])
    if match is not None:
        if "answer" not in data:
            raise InvalidRowError(f"has no answer; match: {match} needs one")
        if reason := unmatchable_reason(match, data["answer"]):
            raise InvalidRowError(reason)
    context = [data["context"]] if isinstance(data.get("context"), str) else []
    digest = sha256_bytes(canonical_json([*map(dict, prompt), *context]))
    return Row(location, digest.removeprefix("sha256:")[:32], prompt, data)


def _parse_prompt(row: Mapping[str, Any]) -> tuple[Message, ...]:
    if ("prompt" in row) == ("messages" in row):
        columns = json.dumps(sorted(row), ensure_ascii=False)[1:-1][:200] or "none"
        raise InvalidRowError(f"needs exactly one of the columns prompt and messages; this row has {columns}")
    messages = row.get("prompt", row.get("messages"))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not messages:
        raise InvalidRowError("the prompt is neither text nor a list of messages")
    for message in messages:
        is_valid = isinstance(message, dict) and message.keys() == {"role", "content"}
        if not is_valid or message["role"] not in ROLES or not isinstance(message["content"], str):
            raise InvalidRowError(
                f"a message must have a role ({', '.join(ROLES)}), text as content, and nothing else"
            )
    if messages[-1]["role"] == "assistant":
        raise InvalidRowError("the last message is the assistant's; put its text into the column answer")
    if not messages[-1]["content"].strip():
        raise InvalidRowError("the last message is empty")
    return tuple(messages)


def _parse_answer(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InvalidRowError(f"the answer is of type {type(value).__name__}, neither text nor a number")
    return value if isinstance(value, str) else repr(value)
