"""Watches the files of an experiment, and sends each change to a browser once."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from perilune.control.runs.experiments import read_progress
from perilune.ui.curves import throughput
from perilune.ui.live.followed import FOLLOWED_FILES, StageFollower
from perilune.ui.report import to_plain
from perilune.ui.view import ExperimentView

REFRESH_INTERVAL_S = 4.0  # between two reads of the list of stages
STAGES_KEY = ""  # key in `Offsets` of the digest of the stages that a reader has
Offsets = dict[str, list[int]]  # by stage: bytes of metrics.jsonl and timings.jsonl that a reader has


@dataclass(frozen=True, slots=True)
class Event:
    """One event of the stream. A reader that sends its `offsets` continues after this event."""

    kind: str
    data: Any
    offsets: Offsets

    def encode(self) -> str:
        """Return the event in the format of server-sent events."""
        offsets = json.dumps(self.offsets, separators=(",", ":"))
        return f"event: {self.kind}\nid: {offsets}\ndata: {json.dumps(to_plain(self.data))}\n\n"


def file_offsets(view: ExperimentView) -> Offsets:
    """Return the sizes of the files and the digest of the stages now. Later changes come as events."""
    sizes: Offsets = {STAGES_KEY: [_digest_stages(view)]}
    for stage in view.stages:
        paths = [stage.attempt_dir / name for name in FOLLOWED_FILES] if stage.attempt_dir else []
        sizes[stage.name] = [path.stat().st_size if path.exists() else 0 for path in paths]
    return sizes


def _digest_stages(view: ExperimentView) -> int:
    stages = [(stage.name, stage.run_id, stage.state, str(stage.attempt_dir)) for stage in view.stages]
    return crc32(repr(stages).encode())


def _known_episodes(stage: StageFollower) -> set[int]:
    """Return the steps with episodes that a reader of the known lines has."""
    steps = [step for line in stage.attempt.metric_lines if isinstance(step := line.get("step"), int)]
    last = max(steps, default=0)
    return {step for step in stage.attempt.episode_steps if step <= last}


class Watch:
    """Follows an experiment for one reader."""

    def __init__(self, view: Callable[[], ExperimentView], offsets: Offsets) -> None:
        self._view = view
        self._offsets = offsets
        self._digest: int | None = None
        self._stages: list[tuple[StageFollower, set[int]]] = []  # with the steps of known episodes
        self._status: Any = None
        self._next_refresh = 0.0

    def poll(self, now: float | None = None) -> Iterator[Event]:
        """Yield the events since the last call.

        "changed": a stage began, ended or has a new attempt, so the reader must load the page again. "steps":
        new lines of one stage. "status": verdicts and progress.
        """
        if time.monotonic() >= self._next_refresh:
            yield from self._refresh()
            self._next_refresh = time.monotonic() + REFRESH_INTERVAL_S
        for follower, episodes in self._stages:
            yield from self._read_new_lines(follower, episodes)
        status = self._current_status(time.time() if now is None else now)
        if status != self._status:
            self._status = status
            yield Event("status", status, self._offsets)

    def _refresh(self) -> Iterator[Event]:
        view = self._view()
        digest = _digest_stages(view)
        if digest != self._digest:
            if self._offsets.get(STAGES_KEY, [digest]) != [digest]:
                yield Event("changed", {}, self._offsets)
            self._digest, self._offsets[STAGES_KEY] = digest, [digest]
            followers = [StageFollower(stage, self._offsets.get(stage.name, (0, 0))) for stage in view.stages]
            self._stages = [(follower, _known_episodes(follower)) for follower in followers]

    def _read_new_lines(self, stage: StageFollower, episodes: set[int]) -> Iterator[Event]:
        metrics, timings = stage.read_new()
        self._offsets[stage.view.name] = stage.offsets
        if not metrics and not timings:
            return
        new = sorted(set(stage.attempt.episode_steps) - episodes)
        episodes.update(new)
        timings = [row | {"tokens_per_second": throughput(row)} for row in timings]
        steps = {"stage": stage.view.name, "metrics": metrics, "timings": timings, "episodes": new}
        yield Event("steps", steps, self._offsets)

    def _current_status(self, now: float) -> dict[str, Any]:
        views = [stage.view for stage, _ in self._stages if stage.view.state == "active"]
        progress = [
            {"stage": view.name, **latest}
            for view in views
            if view.attempt_dir and (latest := read_progress(view.attempt_dir))
        ]
        health = [verdict for stage, _ in self._stages for verdict in stage.health(now)]
        return {"health": to_plain(health), "progress": to_plain(progress)}
