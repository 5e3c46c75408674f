"""Reads the files of an attempt, which may still be running or may have died.

A missing or damaged file reads as empty. A damaged file adds a line to `damage`, which the report shows.
"""

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from perilune.bundle.digest import BUNDLE_FILE
from perilune.data.episode import Episode
from perilune.data.episodes_file import EpisodeScore, read_episodes, read_scores, read_versions
from perilune.errors import RequestError
from perilune.execution.log import log_tail
from perilune.files import finite_number, read_json, read_json_lines

T = TypeVar("T")
Columns = dict[str, list[Any]]

STEP_FILE = re.compile(r"step-(\d+)\.parquet")
LOG_TAIL_LINES = 30
LOG_TAIL_CHARACTERS = 6000


@dataclass
class Attempt:
    """One attempt.

    Attributes:
        root: attempt directory; None before the first attempt.
        damage: errors from files that could not be read.
        known_lines: lines of JSON Lines files that need not be read again, by path.
    """

    root: Path | None
    damage: list[str] = field(default_factory=list)
    known_lines: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)

    @cached_property
    def job(self) -> Mapping[str, Any]:
        return self._document("job.json")

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """artifacts/summary.json; empty until the task has succeeded."""
        return self._document("artifacts/summary.json")

    @cached_property
    def precheck(self) -> Mapping[str, Any]:
        """artifacts/precheck.json: the loaded code, packages and machine."""
        return self._document("artifacts/precheck.json")

    @cached_property
    def verdict(self) -> Mapping[str, Any]:
        """runtime/result.json; empty while the attempt runs."""
        return self._document("runtime/result.json")

    @cached_property
    def progress(self) -> Mapping[str, Any]:
        return self._document("runtime/progress.json")

    @cached_property
    def digest(self) -> str:
        """The bundle's digest, or ""."""
        return str(self._document(BUNDLE_FILE).get("digest", ""))

    @cached_property
    def metrics(self) -> Columns:
        """artifacts/metrics.jsonl as columns, with None for missing values."""
        return to_columns(self.metric_lines)

    @cached_property
    def metric_lines(self) -> list[Mapping[str, Any]]:
        return self._lines("artifacts/metrics.jsonl")

    @cached_property
    def timings(self) -> Columns:
        """artifacts/timings.jsonl as columns."""
        return to_columns(self.timing_lines)

    @cached_property
    def timing_lines(self) -> list[Mapping[str, Any]]:
        return self._lines("artifacts/timings.jsonl")

    @cached_property
    def hardware(self) -> list[Mapping[str, Any]]:
        return self._lines("artifacts/hardware.jsonl")

    def has(self, name: str) -> bool:
        """Return whether the attempt has this file, and the file is not empty."""
        path = None if self.root is None else self.root / name
        return path is not None and path.exists() and path.stat().st_size > 0

    @cached_property
    def spec(self) -> Mapping[str, Any]:
        """The settings of the task in job.json."""
        spec = self.job.get("spec")
        return spec if isinstance(spec, dict) else {}

    @cached_property
    def _episodes_folder(self) -> Path:
        return (self.root or Path()) / "artifacts" / "episodes"

    @property
    def episode_steps(self) -> list[int]:
        """The steps that have a file of episodes, ascending."""
        if self.root is None:
            return []
        try:
            names = os.listdir(self._episodes_folder)  # noqa: PTH208 a path for each is slow
        except OSError:
            return []
        return sorted(int(match[1]) for name in names if (match := STEP_FILE.fullmatch(name)))

    @property
    def episode_files(self) -> list[Path]:
        return [self.episodes_path(step) for step in self.episode_steps]

    def episodes_path(self, step: int) -> Path:
        return self._episodes_folder / f"step-{step:06d}.parquet"

    @property
    def greedy_file(self) -> Path | None:
        path = self._episodes_folder / "greedy.parquet"
        return path if self.root is not None and path.exists() else None

    @property
    def checkpoints(self) -> list[Path]:
        """Checkpoint folders of the attempt: the final one first, then the latest."""
        if self.root is None:
            return []
        folder = self.root / "artifacts" / "checkpoints"
        folders = [folder / "final", *sorted(folder.glob("step-*"), reverse=True)]
        return [folder for folder in folders if folder.is_dir()]

    @property
    def model_folders(self) -> list[Path]:
        """Checkpoint folders of the attempt, then those among its inputs."""
        inputs = [] if self.root is None else sorted((self.root / "inputs").glob("*/"))
        return [*self.checkpoints, *(folder for folder in inputs if folder.is_dir())]

    @property
    def began(self) -> float | None:
        """The time of its claim by a worker, in seconds since the epoch."""
        return self.modified("runtime/claim.json")

    @property
    def seconds(self) -> float | None:
        """Seconds from claim to verdict; of a running attempt, from claim to its last progress."""
        for document in (self.verdict, self.summary):
            if (seconds := finite_number(document.get("seconds"))) is not None:
                return seconds
        began, latest = self.began, finite_number(self.progress.get("time"))
        return max(0.0, latest - began) if began is not None and latest is not None else None

    @property
    def run_seconds(self) -> float | None:
        """Seconds of this attempt and of the earlier attempts of its run."""
        if self.root is None:
            return None
        earlier = [
            Attempt(path)
            for path in self.root.parent.iterdir()
            if path.name.isdigit() and self.root.name.isdigit() and int(path.name) < int(self.root.name)
        ]
        times = [attempt.seconds for attempt in (*earlier, self)]
        known = [seconds for seconds in times if seconds is not None]
        return sum(known) if known else None

    def log_tail(self) -> str:
        if self.root is None:
            return ""
        return log_tail(self.root / "runtime", LOG_TAIL_LINES)[-LOG_TAIL_CHARACTERS:]

    def episodes(self, path: Path, tasks: Collection[str] | None = None) -> list[Episode]:
        """Return the episodes in one of its files, or only those of `tasks` (ids)."""
        return self._unless_damaged(lambda: read_episodes(path, tasks)) or []

    def scores(self, path: Path) -> list[EpisodeScore]:
        return self._unless_damaged(lambda: read_scores(path)) or []

    def versions(self, path: Path) -> NDArray[np.int64]:
        """Return the policy versions of the episodes in one of its files, as `read_versions`."""
        found = self._unless_damaged(lambda: read_versions(path))
        return np.zeros((0, 2), np.int64) if found is None else found

    def rows(self, path: Path) -> list[Mapping[str, Any]]:
        """Return the complete lines of one of its JSON Lines files."""
        rows = self._unless_damaged(lambda: [row for row in read_json_lines(path) if isinstance(row, dict)])
        return [without_huge_integers(row) for row in rows or ()]

    def document(self, path: Path) -> Mapping[str, Any]:
        """Return the JSON object in one of its files."""
        document = self._unless_damaged(lambda: read_json(path)) if path.exists() else None
        return document if isinstance(document, dict) else {}

    def check_summary(self, read: Callable[[], object]) -> None:
        """Call `read`. If it raises the error of a wrong type, empty the summary and record the damage."""
        try:
            read()
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            where = f"{self.root}/artifacts/summary.json"
            self.damage.append(f"{where}: has a value of a wrong type: {error}")
            self.summary = {}

    def _unless_damaged(self, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except RequestError as error:
            if str(error) not in self.damage:
                self.damage.append(str(error))
            return None

    def _document(self, name: str) -> Mapping[str, Any]:
        return {} if self.root is None else self.document(self.root / name)

    def _lines(self, name: str) -> list[Mapping[str, Any]]:
        if name in self.known_lines:
            return self.known_lines[name]
        return [] if self.root is None else self.rows(self.root / name)

    def modified(self, name: str) -> float | None:
        """Return when a file was written, in seconds since the epoch; None if it is missing."""
        path = None if self.root is None else self.root / name
        return path.stat().st_mtime if path is not None and path.exists() else None


def without_huge_integers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with None for each integer beyond the range of floats, which charts cannot show."""
    return {
        name: None if type(value) is int and finite_number(value) is None else value
        for name, value in row.items()
    }


def to_columns(rows: list[Mapping[str, Any]]) -> Columns:
    """Return rows as columns of equal length, ordered by step. The last row of a step counts."""
    by_step = {row["step"]: row for row in rows if isinstance(row.get("step"), int)}
    ordered = [by_step[step] for step in sorted(by_step)]
    names = dict.fromkeys(name for row in ordered for name in row)
    return {name: [row.get(name) for row in ordered] for name in names}
