"""What changed in the files of an experiment since a reader last looked."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perilune.control.runs.experiments import read_progress
from perilune.ui.attempt import Attempt
from perilune.ui.episode_sets import steps_of
from perilune.ui.health import healths_of
from perilune.ui.report import plain
from perilune.ui.view import ExperimentView, StageView

CHUNK = 4 << 20  # bytes of new lines to read at a time; a longer line is skipped
FILES = ("metrics", "timings")
Offsets = dict[str, list[int]]  # stage: bytes of its metrics.jsonl and timings.jsonl that a reader has


@dataclass(frozen=True, slots=True)
class Event:
    """One event of the stream; `offsets` let a reader continue after it."""

    kind: str
    data: Any
    offsets: Offsets

    def encode(self) -> str:
        """The event in the format of server-sent events."""
        place = json.dumps(self.offsets, separators=(",", ":"))
        return f"event: {self.kind}\nid: {place}\ndata: {json.dumps(plain(self.data))}\n\n"


@dataclass
class _Stage:
    """A stage as it was read last."""

    view: StageView
    attempt: Attempt
    episodes: set[int] = field(default_factory=set)


def offsets_of(view: ExperimentView) -> Offsets:
    """The sizes of the files now. What is appended later comes as an event."""
    return {one.name: [_size(path) for path in _paths(one.attempt_dir)] for one in view.stages}


class Watch:
    """Follows an experiment for one reader.

    Args:
        look: the experiment as it is now.
        offsets: what the reader has.
    """

    def __init__(self, look: Callable[[], ExperimentView], offsets: Offsets) -> None:
        self._look = look
        self._offsets = offsets
        self._shape: Any = None
        self._stages: list[_Stage] = []
        self._status: Any = None

    def poll(self, now: float | None = None) -> Iterator[Event]:
        """The events since the last call.

        "changed" (a stage began, ended or has a new attempt: read the document again), "steps" (new lines of
        one stage), "status" (verdicts and progress).
        """
        view = self._look()
        shape = [(one.name, one.run_id, one.state, str(one.attempt_dir)) for one in view.stages]
        if shape != self._shape:
            if self._shape is not None:
                yield Event("changed", {}, self._offsets)
            self._shape = shape
            self._stages = [_Stage(one, Attempt(one.attempt_dir)) for one in view.stages]
            for stage in self._stages:
                stage.episodes = set(steps_of(stage.attempt)) if stage.view.state == "active" else set()
        for stage in self._stages:
            yield from self._new_lines(stage)
        status = self._current_status(time.time() if now is None else now)
        if status != self._status:
            self._status = status
            yield Event("status", status, self._offsets)

    def _new_lines(self, stage: _Stage) -> Iterator[Event]:
        offsets = self._offsets.setdefault(stage.view.name, [0, 0])
        found: dict[str, list[Mapping[str, Any]]] = {}
        for place, path in enumerate(_paths(stage.view.attempt_dir)):
            lines, offsets[place] = appended(path, offsets[place])
            found[FILES[place]] = lines
        if not any(found.values()):
            return
        _extend(stage.attempt.metric_lines, found["metrics"])
        _extend(stage.attempt.timing_lines, found["timings"])
        episodes = set(steps_of(stage.attempt))
        new = sorted(episodes - stage.episodes)
        stage.episodes = episodes
        yield Event("steps", {"stage": stage.view.name, **found, "episodes": new}, self._offsets)

    def _current_status(self, now: float) -> dict[str, Any]:
        pairs = [(stage.view, stage.attempt) for stage in self._stages]
        live = [stage for stage in self._stages if stage.view.state == "active"]
        progress = [
            {"stage": stage.view.name, **found}
            for stage in live
            if stage.view.attempt_dir and (found := read_progress(stage.view.attempt_dir))
        ]
        return {"health": plain(healths_of(pairs, now)), "progress": plain(progress)}


def appended(path: Path, offset: int) -> tuple[list[Mapping[str, Any]], int]:
    """The complete lines of a JSON Lines file after `offset`, and the offset after them.

    A line that is no JSON object, or is longer than `CHUNK`, is left out. A file that was replaced by a
    shorter one is read from its start.
    """
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(offset if offset <= size else (offset := 0))
            data = stream.read(CHUNK)
    except OSError:
        return [], offset
    end = data.rfind(b"\n") + 1
    if end == 0:
        return [], offset + (len(data) if len(data) == CHUNK else 0)
    rows: list[Mapping[str, Any]] = []
    for line in data[:end].splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows, offset + end


def _extend(kept: list[Mapping[str, Any]], new: list[Mapping[str, Any]]) -> None:
    """Add lines that the first reading of the file may have found already."""
    known = {row.get("step") for row in kept[-2 * len(new) - 16 :]}
    kept.extend(row for row in new if row.get("step") not in known)


def _paths(root: Path | None) -> list[Path]:
    return [] if root is None else [root / "artifacts" / f"{name}.jsonl" for name in FILES]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
