"""Follows a stage: reads its files once, and then only their new lines."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perilune.errors import RequestError
from perilune.files import open_regular
from perilune.ui.attempt import Attempt, without_huge_integers
from perilune.ui.health import StageHealth, assess_stages
from perilune.ui.view import StageView

CHUNK_BYTES = 4 << 20  # bytes to read at a time; a longer line is skipped
FOLLOWED_FILES = ("artifacts/metrics.jsonl", "artifacts/timings.jsonl")
JUDGE_INTERVAL_FACTOR = 250  # judging takes at most 1/250 of the time

Row = dict[str, Any]


class StageFollower:
    """Follows one attempt.

    Args:
        known: bytes of each of `FOLLOWED_FILES` that the reader has already.

    Attributes:
        view: the stage.
        attempt: the attempt, with all lines that were read.
        offsets: bytes of each of `FOLLOWED_FILES` that were read.
    """

    def __init__(self, view: StageView, known: Sequence[int] = (0, 0)) -> None:
        self.view = view
        self.attempt = Attempt(view.attempt_dir, known_lines={name: [] for name in FOLLOWED_FILES})
        self.offsets = [0, 0]
        self._health: list[StageHealth] = []
        self._next = 0.0
        for index, most in enumerate(known):
            self._read(index, most)

    def read_new(self) -> tuple[list[Row], list[Row]]:
        """Return the new lines of metrics.jsonl and timings.jsonl."""
        return self._read(0), self._read(1)

    def health(self, now: float) -> list[StageHealth]:
        """Return the verdict at `now` (seconds since the epoch); the previous one if judging took long."""
        began = time.monotonic()
        if began >= self._next:
            fresh = Attempt(self.view.attempt_dir, known_lines=self.attempt.known_lines)  # without old files
            self._health = assess_stages([(self.view, fresh)], now)
            self._next = time.monotonic() + JUDGE_INTERVAL_FACTOR * (time.monotonic() - began)
        return self._health

    def _read(self, place: int, until: int | None = None) -> list[Row]:
        if self.view.attempt_dir is None:
            return []
        path, new_rows = self.view.attempt_dir / FOLLOWED_FILES[place], list[Row]()
        while until is None or self.offsets[place] < until:
            rows, offset = read_appended(path, self.offsets[place], until)
            if offset == self.offsets[place]:
                break
            new_rows += rows
            self.offsets[place] = offset
        self.attempt.known_lines[FOLLOWED_FILES[place]].extend(new_rows)
        return new_rows


def read_appended(path: Path, offset: int, until: int | None = None) -> tuple[list[Row], int]:
    """Return the complete lines of a JSON Lines file from `offset` to `until`, and the offset after them.

    A line that is no JSON object, or is longer than `CHUNK_BYTES`, is left out. A file that was replaced by a
    shorter one is read from its start.
    """
    try:
        with open_regular(path) as stream:
            size = stream.seek(0, 2)
            stream.seek(offset if offset <= size else (offset := 0))
            data = stream.read(CHUNK_BYTES if until is None else min(CHUNK_BYTES, max(0, until - offset)))
    except (OSError, RequestError):
        return [], offset
    end = data.rfind(b"\n") + 1
    if end == 0:
        return [], offset + (len(data) if len(data) == CHUNK_BYTES else 0)
    rows: list[Row] = []
    for line in data[:end].splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(without_huge_integers(row))
    return rows, offset + end
