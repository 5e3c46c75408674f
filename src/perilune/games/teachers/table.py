"""Solved games: tables of move probabilities, cached in files."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perilune.files import canonical_json, home_directory, sha256_bytes, write_atomic

CACHE_FOLDER = "teachers"  # in the home directory
_INDEX = {"keys": np.uint8, "key_ends": np.int64, "row_ends": np.int64}
_ARRAYS = {**_INDEX, "actions": np.int32, "probabilities": np.float64}


@dataclass(frozen=True)
class PolicyTable:
    """Action probabilities by information state, in columns.

    Attributes:
        keys: uint8, the rows' names one after another, in UTF-8.
        key_ends: int64[N], the end of each name.
        row_ends: int64[N], the end of each row in the columns below.
        actions: int32[M].
        probabilities: float64[M]; those of a row sum to 1.
    """

    keys: NDArray[np.uint8]
    key_ends: NDArray[np.int64]
    row_ends: NDArray[np.int64]
    actions: NDArray[np.int32]
    probabilities: NDArray[np.float64]

    @classmethod
    def from_rows(cls, rows: Mapping[str, Mapping[int, float]]) -> PolicyTable:
        """Return the table with these rows, without actions of probability 0."""
        names = [name.encode() for name in rows]
        kept = [{action: p for action, p in row.items() if p > 0} for row in rows.values()]
        return cls(
            np.frombuffer(b"".join(names), np.uint8),
            np.cumsum([len(name) for name in names], dtype=np.int64),
            np.cumsum([len(row) for row in kept], dtype=np.int64),
            np.array([action for row in kept for action in row], np.int32),
            np.array([p for row in kept for p in row.values()], np.float64),
        )

    def __len__(self) -> int:
        return len(self.key_ends)

    def row(self, key: str) -> dict[int, float]:
        """Return the action probabilities in the information state `key`.

        Raises:
            KeyError: if there is no such row.
        """
        number = self._row_numbers[key]
        row = slice(self.row_ends[number - 1] if number else 0, self.row_ends[number])
        return dict(zip(self.actions[row].tolist(), self.probabilities[row].tolist(), strict=True))

    def rows(self) -> dict[str, dict[int, float]]:
        return {key: self.row(key) for key in self._row_numbers}

    @property
    def digest(self) -> str:
        """SHA-256 of the columns, in hexadecimal."""
        digest = hashlib.sha256()
        for name in _ARRAYS:
            column = getattr(self, name)
            digest.update(f"{name}:{len(column)}:".encode() + column.tobytes())
        return digest.hexdigest()

    def validate(self) -> None:
        """Raise ValueError if the columns are inconsistent."""
        for name, dtype in _ARRAYS.items():
            column = getattr(self, name)
            if column.dtype != dtype or column.ndim != 1:
                raise ValueError(f"the column {name} is {column.dtype}{list(column.shape)}")
        ends = [(self.key_ends, len(self.keys)), (self.row_ends, len(self.actions))]
        if len(self.row_ends) != len(self) or len(self.probabilities) != len(self.actions) or not len(self):
            raise ValueError("the columns are of different lengths")
        if any(np.any(np.diff(end, prepend=0) <= 0) or end[-1] != total for end, total in ends):
            raise ValueError("the rows do not cover the columns")
        sums = np.add.reduceat(self.probabilities, np.concatenate([[0], self.row_ends[:-1]]))
        if not (np.all(self.probabilities > 0) and np.allclose(sums, 1.0, atol=1e-9)):
            raise ValueError("the probabilities of a row do not sum to 1")

    @cached_property
    def _row_numbers(self) -> dict[str, int]:
        blob, numbers, begin = self.keys.tobytes(), {}, 0
        for number, end in enumerate(self.key_ends.tolist()):
            numbers[blob[begin:end].decode()] = number
            begin = end
        return numbers


def load_or_solve(request: Mapping[str, Any], solve: Callable[[], PolicyTable]) -> PolicyTable:
    """Read the table that `request` describes from its file, or call `solve` and cache the result.

    The file is named after a digest of the request and written atomically. A file that is damaged or contains
    another table is logged and replaced.

    Args:
        request: everything that determines the table: game, algorithm, iterations, seed, versions.
    """
    name = f"{request['algorithm']}-{sha256_bytes(canonical_json(request))}.safetensors"
    path = home_directory() / CACHE_FOLDER / name
    log = logging.getLogger(__name__)
    if path.exists():
        try:
            return _read_table(path, request)
        except Exception as error:  # a damaged file may raise anything
            log.warning("%s is damaged (%s); solving the game again", path, error)
    table = solve()
    try:
        write_atomic(path, _encode(table, request))
    except OSError as error:
        log.warning("cannot write %s (%s); the game will be solved again next time", path, error.strerror)
    return table


def _encode(table: PolicyTable, request: Mapping[str, Any]) -> bytes:
    from safetensors.numpy import save

    # A single entry, because the order of several is not fixed and equal tables must be equal files.
    about = canonical_json({"request": request, "sha256": table.digest}).decode()
    data: bytes = save({name: getattr(table, name) for name in _ARRAYS}, {"about": about})
    return data


def _read_table(path: Path, request: Mapping[str, Any]) -> PolicyTable:
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        about = json.loads((file.metadata() or {})["about"])
        table = PolicyTable(**{name: file.get_tensor(name) for name in _ARRAYS})
    if about["request"] != request:
        raise ValueError("it belongs to another request")
    table.validate()
    if about["sha256"] != table.digest:
        raise ValueError("its digest does not match")
    return table
