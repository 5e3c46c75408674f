"""What has been seen of a stream of records, kept in a file so that memory does not grow with the stream."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

_SCHEMA = """
    PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536; PRAGMA temp_store = FILE;
    CREATE TABLE digests (digest BLOB PRIMARY KEY, place INTEGER) WITHOUT ROWID;
    CREATE TABLE signatures (place INTEGER PRIMARY KEY, signature BLOB);
    CREATE TABLE bands (band INTEGER, key BLOB, place INTEGER, PRIMARY KEY (band, key, place)) WITHOUT ROWID;
    CREATE TABLE kept (task BLOB, score REAL, place INTEGER);
"""
_CHOOSE = """
    INSERT INTO chosen SELECT place FROM (
        SELECT place, row_number() OVER (PARTITION BY task ORDER BY score DESC, place) AS rank FROM kept
    ) WHERE rank <= ?
"""
MOST_CANDIDATES = 50  # signatures compared with one text, for a crowd that shares a band


class Seen:
    """An index of the records so far, by content, likeness and task; `place` is a record's number.

    Args:
        path: of the file it is kept in, which must not exist.
        bands: into how many parts a signature is cut; texts that agree in one of them are compared.
    """

    def __init__(self, path: Path, bands: int = 16) -> None:
        self._bands = bands
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.executescript(_SCHEMA)
        self._connection.execute("BEGIN")

    def __enter__(self) -> Seen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def same(self, digest: bytes, place: int) -> int | None:
        """The place of an earlier record with this digest, or None, and then it is noted at `place`."""
        row = self._connection.execute("SELECT place FROM digests WHERE digest = ?", (digest,)).fetchone()
        if row is not None:
            return int(row[0])
        self._connection.execute("INSERT INTO digests VALUES (?, ?)", (digest, place))
        return None

    def alike(self, signature: NDArray[np.uint32], threshold: float) -> tuple[int, float] | None:
        """The place of an earlier record of which at least a share `threshold` of the signature agrees.

        The share of equal entries of two MinHash signatures estimates the Jaccard similarity of the texts
        (Broder 1997). Returns place and share of the most similar, or None.
        """
        found: dict[int, None] = {}
        for band, key in enumerate(self._keys(signature)):
            rows = self._connection.execute(
                "SELECT place FROM bands WHERE band = ? AND key = ? LIMIT ?", (band, key, MOST_CANDIDATES)
            )
            found |= dict.fromkeys(place for (place,) in rows)
        best: tuple[int, float] | None = None
        for place in found:
            (raw,) = self._connection.execute(
                "SELECT signature FROM signatures WHERE place = ?", (place,)
            ).fetchone()
            share = float(np.mean(np.frombuffer(raw, dtype=np.uint32) == signature))
            if share >= threshold and (best is None or share > best[1]):
                best = (place, share)
        return best

    def note(self, signature: NDArray[np.uint32], place: int) -> None:
        """Let later records be compared with this signature."""
        self._connection.execute("INSERT INTO signatures VALUES (?, ?)", (place, signature.tobytes()))
        rows = [(band, key, place) for band, key in enumerate(self._keys(signature))]
        self._connection.executemany("INSERT OR IGNORE INTO bands VALUES (?, ?, ?)", rows)

    def keep(self, task: bytes, score: float, place: int) -> None:
        """Note that the record at `place` answers `task` and has this score."""
        self._connection.execute("INSERT INTO kept VALUES (?, ?, ?)", (task, score, place))

    def drop_all_but_best(self, count: int) -> None:
        """Of each task leave the `count` records of the best score, the earlier first among equals."""
        self._connection.execute("CREATE TABLE chosen (place INTEGER PRIMARY KEY)")
        self._connection.execute(_CHOOSE, (count,))

    def chosen(self, place: int) -> bool:
        """Whether `drop_all_but_best` left the record at `place`."""
        found = self._connection.execute("SELECT 1 FROM chosen WHERE place = ?", (place,)).fetchone()
        return found is not None

    def _keys(self, signature: NDArray[np.uint32]) -> Sequence[bytes]:
        return [part.tobytes() for part in np.split(signature, self._bands)]
