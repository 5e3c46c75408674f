"""Where the rows of JSON Lines files lie: each is checked once, and read again when it is wanted.

A row costs 37 bytes here however long it is, so that a million of them fit anywhere.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from perilune.environments.builtin.jsonl_rows import Broken, BrokenRowError, Row, parsed
from perilune.environments.core.matching import Match
from perilune.environments.core.protocol import Split
from perilune.errors import RequestError
from perilune.files import open_regular

LONGEST_LINE = 16 << 20  # bytes; one line cannot fill the memory


class HeldOut(BaseModel):
    """Which rows are kept for evaluations: a share, those that a column marks, or those of another file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    share: float = Field(
        0.1, gt=0, lt=1, description="about this share of all tasks, chosen by a digest of what they ask"
    )
    column: str | None = Field(None, description="instead: the rows in which this column has `value`")
    value: str | bool = Field("test", description="what the column says of rows that are held out")
    path: str | None = Field(None, description="instead: the rows of this file or folder")

    @model_validator(mode="after")
    def _one_way(self) -> HeldOut:
        if self.column is not None and self.path is not None:
            raise ValueError("has both column and path; choose one")
        return self

    def holds(self, row: Row) -> bool:
        """Whether a row of the file with all tasks is held out."""
        if self.column is None:
            return int(row.task_id[:8], 16) < self.share * (1 << 32)
        if self.column not in row.data:
            raise RequestError(f"has no column '{self.column}'", where=row.place, remedy="heldout.column")
        said = row.data[self.column]
        return type(said) is type(self.value) and said == self.value


@dataclass(eq=False)
class RowIndex:
    """The sound rows of some files, in the order in which they were read.

    Attributes:
        splits: numbers of the rows of each split.
    """

    match: Match | None
    files: list[Path] = field(default_factory=list)
    splits: dict[Split, np.ndarray] = field(default_factory=dict)
    _file: array[int] = field(default_factory=lambda: array("I"))
    _line: array[int] = field(default_factory=lambda: array("I"))
    _offset: array[int] = field(default_factory=lambda: array("Q"))
    _digests: bytearray = field(default_factory=bytearray)  # 16 bytes a row
    _held_out: bytearray = field(default_factory=bytearray)

    def row(self, number: int) -> Row:
        """Read a row again.

        Raises:
            RequestError: when the file has changed since.
        """
        file = self.files[self._file[number]]
        try:
            with open_regular(file) as lines:
                lines.seek(self._offset[number])
                row = parsed(lines.readline(LONGEST_LINE + 1), self.place(number), self.match)
            unchanged = bytes.fromhex(row.task_id) == self._digest(number)
        except (OSError, BrokenRowError, RequestError):
            unchanged = False
        if not unchanged:
            raise RequestError("has changed since it was first read", where=self.place(number))
        return row

    def place(self, number: int) -> str:
        """file:line of a row."""
        return f"{self.files[self._file[number]]}:{self._line[number]}"

    def add(self, row: Row, line: int, offset: int, is_held_out: bool) -> None:
        """Note a sound row of the last of `files`."""
        self._file.append(len(self.files) - 1)
        self._line.append(line)
        self._offset.append(offset)
        self._digests += bytes.fromhex(row.task_id)
        self._held_out.append(is_held_out)

    def repeated(self) -> list[tuple[int, int]]:
        """Rows that ask what an earlier one asks, and the first that does, in order."""
        digests = np.frombuffer(self._digests, dtype=np.uint64).reshape(-1, 2)
        order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equal ones stay in order
        same = np.flatnonzero((digests[order][1:] == digests[order][:-1]).all(axis=1)) + 1
        firsts: dict[int, int] = {}
        for place in same:  # of those that repeat alone
            before = int(order[place - 1])
            firsts[int(order[place])] = firsts.get(before, before)
        return sorted(firsts.items())

    def split(self, without: list[int]) -> None:
        """Tell the splits apart, but for some rows."""
        kept = np.ones(len(self._held_out), dtype=bool)
        kept[without] = False
        held_out = np.frombuffer(self._held_out, dtype=np.uint8).astype(bool)
        self.splits = {
            "train": np.flatnonzero(kept & ~held_out).astype(np.uint32),
            "heldout": np.flatnonzero(kept & held_out).astype(np.uint32),
        }

    def _digest(self, number: int) -> bytes:
        return bytes(self._digests[16 * number : 16 * number + 16])


def indexed(path: str, match: Match | None, broken: Broken, held_out: HeldOut) -> RowIndex:
    """The index of `path`, a file or a folder of *.jsonl, and of what is held out, while no file changes.

    Args:
        match: how answers are compared, so that they can be; None where none is needed.
        broken: "stop" at the first broken row, or "drop" all, and log how many. What was asked before is
            broken, too: what is held out is read first, so that a row in both is one that training lacks.

    Raises:
        RequestError: when a file cannot be read, a path holds no rows, or a row is broken.
    """
    paths = [path] if held_out.path is None else [held_out.path, path]
    files = tuple(tuple(_files(Path(one))) for one in paths)
    versions = tuple((one.stat().st_mtime_ns, one.stat().st_size) for some in files for one in some)
    return _indexed(files, versions, match, broken, held_out)


@lru_cache(maxsize=2)
def _indexed(
    files: tuple[tuple[Path, ...], ...],
    versions: tuple[tuple[int, int], ...],
    match: Match | None,
    broken: Broken,
    held_out: HeldOut,
) -> RowIndex:
    index, told = RowIndex(match), _Told(broken)
    for some in files:
        before = len(index._held_out)
        apart = held_out.path is not None
        for file in some:
            index.files.append(file)
            for line, offset, row in _rows(file, match, told):
                index.add(row, line, offset, some is files[0] if apart else held_out.holds(row))
        if len(index._held_out) == before:
            raise RequestError("holds no tasks", where=str(some[0].parent if len(some) > 1 else some[0]))
    repeated = index.repeated()
    for again, first in repeated:
        told.broken(index.place(again), f"asks what {index.place(first)} asks")
    index.split([again for again, _ in repeated])
    if told.count:
        kept = sum(map(len, index.splits.values()))
        logging.getLogger(__name__).warning(
            "%d of %d rows are broken and left out; the first: %s", told.count, kept + told.count, told.first
        )
    return index


class _Told:
    """What is done about broken rows."""

    def __init__(self, policy: Broken) -> None:
        self._policy = policy
        self.count, self.first = 0, ""

    def broken(self, place: str, reason: str) -> None:
        if self._policy == "stop":
            remedy = "mend the row, or leave broken rows out with broken_rows: drop"
            raise RequestError(reason, where=place, remedy=remedy)
        self.count += 1
        self.first = self.first or f"{place}: {reason}"


def _files(path: Path) -> Iterator[Path]:
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


def _rows(file: Path, match: Match | None, told: _Told) -> Iterator[tuple[int, int, Row]]:
    """Sound rows with their line and the byte at which it begins."""
    try:
        with open_regular(file) as lines:
            number = offset = 0
            while raw := lines.readline(LONGEST_LINE + 1):
                number, begin, offset = number + 1, offset, offset + len(raw)
                place = f"{file}:{number}"
                if len(raw) > LONGEST_LINE:
                    while (rest := lines.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                        pass
                    offset = lines.tell()
                    told.broken(place, f"longer than {LONGEST_LINE:,} bytes")
                elif raw.strip():
                    try:
                        row = parsed(raw, place, match)
                    except BrokenRowError as error:
                        told.broken(place, str(error))
                    else:
                        yield number, begin, row
    except OSError as error:
        raise RequestError(f"cannot be read: {error.strerror}", where=str(file)) from None
