"""An index of earlier records, in an SQLite file so that memory does not grow with the number of records."""

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
    CREATE TABLE signatures (place INTEGER PRIMARY KEY, signature BLOB, score REAL);
    CREATE TABLE replaced (place INTEGER PRIMARY KEY, better INTEGER, similarity REAL);
    CREATE TABLE bands (band INTEGER, key BLOB, place INTEGER, PRIMARY KEY (band, key, place)) WITHOUT ROWID;
    CREATE TABLE kept (task BLOB, score REAL, place INTEGER);
"""
_KEEP_BEST = """
    INSERT INTO chosen SELECT place FROM (
        SELECT place, row_number() OVER (PARTITION BY task ORDER BY score DESC, place) AS rank FROM kept
        WHERE place NOT IN (SELECT place FROM replaced)
    ) WHERE rank <= ?
"""
BANDS = 16  # parts of a signature; texts that agree in at least one part are compared
MAX_CANDIDATES = 50  # signatures per band to compare with one text


class RecordIndex:
    """Indexes records by content, similarity and task. A record has a number, its `place`, in reading order.

    Args:
        path: the index file, which must not exist.
    """

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.executescript(_SCHEMA)
        self._connection.execute("BEGIN")

    def __enter__(self) -> RecordIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def find_or_add(self, digest: bytes, place: int) -> int | None:
        """Return the place of an earlier record with this digest; if there is none, add it at `place`."""
        row = self._connection.execute("SELECT place FROM digests WHERE digest = ?", (digest,)).fetchone()
        if row is not None:
            return int(row[0])
        self._connection.execute("INSERT INTO digests VALUES (?, ?)", (digest, place))
        return None

    def find_similar(self, signature: NDArray[np.uint32], threshold: float) -> list[tuple[int, float, float]]:
        """Return place, similarity and score of earlier records of at least `threshold`, best score first.

        The share of equal entries of two MinHash signatures uint32[64] estimates the Jaccard similarity of
        the texts (Broder 1997).
        """
        candidates: dict[int, None] = {}
        for band, key in enumerate(self._keys(signature)):
            rows = self._connection.execute(
                "SELECT place FROM bands WHERE band = ? AND key = ? LIMIT ?", (band, key, MAX_CANDIDATES)
            )
            candidates |= dict.fromkeys(place for (place,) in rows)
        similar = []
        for place in candidates:
            raw, score = self._connection.execute(
                "SELECT signature, score FROM signatures WHERE place = ?", (place,)
            ).fetchone()
            share = float(np.mean(np.frombuffer(raw, dtype=np.uint32) == signature))
            if share >= threshold:
                similar.append((place, share, score))
        return sorted(similar, key=lambda found: (-found[2], -found[1], found[0]))

    def add_signature(self, signature: NDArray[np.uint32], score: float, place: int) -> None:
        """Add a signature that later records are compared with."""
        row = (place, signature.tobytes(), score)
        self._connection.execute("INSERT INTO signatures VALUES (?, ?, ?)", row)
        rows = [(band, key, place) for band, key in enumerate(self._keys(signature))]
        self._connection.executemany("INSERT OR IGNORE INTO bands VALUES (?, ?, ?)", rows)

    def replace(self, place: int, better: int, similarity: float) -> None:
        """Drop the record at `place` for a similar one with a higher score at `better`."""
        (raw,) = self._connection.execute(
            "SELECT signature FROM signatures WHERE place = ?", (place,)
        ).fetchone()
        rows = [(band, key, place) for band, key in enumerate(self._keys(np.frombuffer(raw, np.uint32)))]
        self._connection.executemany("DELETE FROM bands WHERE band = ? AND key = ? AND place = ?", rows)
        self._connection.execute("INSERT INTO replaced VALUES (?, ?, ?)", (place, better, similarity))

    def find_replacement(self, place: int) -> tuple[int, float] | None:
        """Return place and similarity of the record for which the record at `place` was dropped, or None."""
        rows = self._connection.execute("SELECT better, similarity FROM replaced WHERE place = ?", (place,))
        return next(rows, None)

    def add_score(self, task: bytes, score: float, place: int) -> None:
        self._connection.execute("INSERT INTO kept VALUES (?, ?, ?)", (task, score, place))

    def keep_best(self, count: int) -> None:
        """Keep the `count` records with the best scores of each task; earlier ones win ties."""
        self._connection.execute("CREATE TABLE chosen (place INTEGER PRIMARY KEY)")
        self._connection.execute(_KEEP_BEST, (count,))

    def is_kept(self, place: int) -> bool:
        """Return whether `keep_best` kept the record at `place`."""
        row = self._connection.execute("SELECT 1 FROM chosen WHERE place = ?", (place,)).fetchone()
        return row is not None

    def _keys(self, signature: NDArray[np.uint32]) -> Sequence[bytes]:
        return [part.tobytes() for part in np.split(signature, BANDS)]
