"""The interface of a task to its bundle: job, inputs, artifacts and progress.

Reproducible values (rewards, losses, pass@k) go to `metric`, and wall-clock times to `timing`. `perilune
reproduce` compares metrics byte for byte.
"""

import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perilune.bundle.job import Job
from perilune.files import (
    append_json_line,
    canonical_json,
    read_json,
    read_json_lines,
    write_atomic,
    write_json_lines,
)
from perilune.redaction import redact_document

SUMMARY = "summary.json"
EVALUATIONS = "evaluations.jsonl"
SCHEDULE = "schedule.jsonl"
PROGRESS_INTERVAL = 0.2  # seconds between two writes of runtime/progress.json


class Workspace:
    """The folder of one attempt.

    Attributes:
        leads: whether this process writes the artifacts; of several processes, only the first does.
    """

    leads = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.job = Job.model_validate(read_json(root / "job.json")).at(root)
        self.artifacts = root / "artifacts"
        self.runtime = root / "runtime"
        self.checkpoints = self.artifacts / "checkpoints"
        self.episodes = self.artifacts / "episodes"
        for directory in (self.artifacts, self.runtime):
            directory.mkdir(exist_ok=True)
        self._last_progress = 0.0
        self._progress_began: dict[str, Any] = {}
        self._only_for_resuming: list[Path] = []

    def input(self, name: str) -> Path:
        """Return the path of the input that the key `name` of the stage consumes.

        Raises:
            KeyError: when the job has no such input.
        """
        for reference in self.job.inputs:
            if reference.name == name:
                return self.root / reference.path
        raise KeyError(name)

    def has_input(self, name: str) -> bool:
        """Return whether the key `name` consumes an earlier stage, and not the model section."""
        return any(reference.name == name for reference in self.job.inputs)

    def starting_checkpoint(self) -> Path | None:
        """Return the folder of the initial weights: those of an earlier stage or of the recipe's model."""
        return next((self.input(name) for name in ("checkpoint", "model") if self.has_input(name)), None)

    def delete_at_end(self, path: Path) -> None:
        """Delete `path` after the summary is written, because only resuming needs it."""
        self._only_for_resuming.append(path)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write artifacts/summary.json, then delete the files that only resuming needs."""
        write_atomic(self.artifacts / SUMMARY, canonical_json(redact_document(summary)) + b"\n")
        for path in self._only_for_resuming:
            hidden = path.with_name(f".{path.name}.old")
            path.rename(hidden)  # so an interrupted deletion leaves no folder that looks complete
            shutil.rmtree(hidden)

    def metric(self, step: int, **figures: Any) -> None:
        """Append one line of reproducible values to artifacts/metrics.jsonl."""
        append_json_line(self.artifacts / "metrics.jsonl", {"step": step, **figures})

    def metrics(self) -> list[dict[str, Any]]:
        """Return all lines that `metric` wrote, including those of earlier attempts."""
        return list(read_json_lines(self.artifacts / "metrics.jsonl"))

    def step_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics` without step 0, which has only the evaluation before training."""
        return [line for line in self.metrics() if line["step"] > 0]

    def evaluation(self, step: int, name: str, values: Mapping[str, Mapping[str, float]]) -> None:
        """Append the figures of the set `name`, by task or example, to artifacts/evaluations.jsonl."""
        append_json_line(self.artifacts / EVALUATIONS, {"step": step, "set": name, **values})

    def evaluations(self) -> list[dict[str, Any]]:
        """Return all lines that `evaluation` wrote, including those of earlier attempts."""
        return list(read_json_lines(self.artifacts / EVALUATIONS))

    def timing(self, step: int, **seconds: float) -> None:
        """Append one line of timings (seconds, tokens per second) to artifacts/timings.jsonl."""
        append_json_line(self.artifacts / "timings.jsonl", {"step": step, **seconds})

    def rewind(self, step: int) -> None:
        """Delete metrics, episodes and the schedule after `step`, before resuming from its checkpoint."""
        for name in ("metrics.jsonl", "timings.jsonl", SCHEDULE, EVALUATIONS):
            path = self.artifacts / name
            if path.exists():
                write_json_lines(path, [row for row in read_json_lines(path) if row["step"] <= step])
        for path in self.episodes.glob("step-*.parquet"):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()

    def progress(self, done: int, total: int, unit: str = "steps", **figures: float) -> None:
        """Report progress. Cheap enough to call at every step.

        Each report contains, as `began`, the attempt's first report with the same unit and total, from which
        readers estimate the time left.
        """
        now, clock = time.monotonic(), time.time()
        key = {"unit": unit, "total": total}
        if not self._progress_began or key != {name: self._progress_began[name] for name in key}:
            self._progress_began = {**key, "done": done, "time": clock}
        if done < total and now - self._last_progress < PROGRESS_INTERVAL:
            return
        self._last_progress = now
        began = {name: self._progress_began[name] for name in ("done", "time")}
        line = {"done": done, **key, "figures": figures, "time": clock, "began": began}
        temporary = self.runtime / ".progress.tmp"
        temporary.write_bytes(canonical_json(redact_document(line)))
        temporary.replace(self.runtime / "progress.json")  # without fsync, because progress may be lost

    def event(self, kind: str, **details: Any) -> None:
        """Record that something happened (a checkpoint, a resume, a warning) in runtime/events.jsonl."""
        append_json_line(self.runtime / "events.jsonl", {"time": time.time(), "kind": kind, **details})

    def log(self, message: str) -> None:
        """Write one line to the run's log."""
        stamp = time.strftime("%H:%M:%SZ", time.gmtime())  # Z: UTC
        sys.stdout.write(f"{stamp} {message}\n")
        sys.stdout.flush()

    def secret(self, name: str) -> str:
        """Return the value of a secret that the job names, from this process's environment only.

        Raises:
            KeyError: when the job does not name it or the environment lacks it.
        """
        if name not in self.job.secrets:
            raise KeyError(name)
        return os.environ[name]


class FollowerWorkspace(Workspace):
    """The workspace of every process but the first. It keeps metrics in memory and writes only to its log."""

    leads = False

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._lines: list[dict[str, Any]] = []

    def metric(self, step: int, **figures: Any) -> None:
        """Keep the metrics in memory."""
        self._lines.append({"step": step, **figures})

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of earlier attempts and of this attempt."""
        return list(self._lines)

    def rewind(self, step: int) -> None:
        """Read the metrics up to `step` that the first process wrote, after it has rewound."""
        self._lines = [line for line in super().metrics() if line["step"] <= step]

    def evaluation(self, step: int, name: str, values: Mapping[str, Mapping[str, float]]) -> None:
        """Do nothing: the first process writes it."""

    def timing(self, step: int, **seconds: float) -> None:
        """Do nothing: the first process writes it."""

    def progress(self, done: int, total: int, unit: str = "steps", **figures: float) -> None:
        """Do nothing: the first process writes it."""

    def event(self, kind: str, **details: Any) -> None:
        """Do nothing: the first process writes it."""
