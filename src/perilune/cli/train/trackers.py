"""Background processes that copy the metrics of an experiment to trackers while it runs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from perilune.execution.launchers.process import start_detached

if TYPE_CHECKING:
    from perilune.control.runs.experiments import Control

LAST_SECONDS = 60.0  # seconds that trackers have to finish after the experiment


class Trackers:
    """One `perilune track --follow` process for each run and tracker of an experiment.

    A tracker that fails causes one warning and is not started again; the experiment continues. The processes
    end with the process that started them.
    """

    def __init__(self, control: Control, names: Sequence[str]) -> None:
        self._control, self._names = control, list(names)
        self._processes: list[tuple[str, str, Path, subprocess.Popen[bytes]]] = []

    def begin(self, stage: str, run_id: str, *, ended: bool = False) -> None:
        """Track a run to its end. A run that has `ended` before is tracked only if it never was."""
        for name in self._names:
            log = tracker_folder(self._control, run_id, name) / "log"
            if ended and log.exists():
                continue
            log.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "perilune.cli.main", "track", run_id, "--to", name]
            command += ["--follow", "--tied"]
            log.unlink(missing_ok=True)
            self._processes.append((stage, name, log, start_detached(command, log)))

    def warnings(self, seconds: float = 0.0) -> Iterator[str]:
        """Yield a warning for each tracker that failed since the last call. Waits `seconds` for others."""
        until = time.monotonic() + seconds
        for entry in list(self._processes):
            stage, name, log, process = entry
            try:
                code = process.wait(max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                continue
            self._processes.remove(entry)
            if code and name in self._names:
                self._names.remove(name)
                lines = log.read_text(errors="replace").strip().splitlines()
                yield (
                    f"warning: tracking with {name} failed at {stage} and is off for later stages:"
                    f" {' '.join(lines[-2:])} (see {log})"
                )


def tracker_folder(control: Control, run_id: str, name: str) -> Path:
    """Return the folder in a run that holds the lock and the log of one tracker."""
    return control.home.run(run_id) / "tracking" / name
