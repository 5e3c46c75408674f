"""Placement `local`: this machine. Staging is a copy, pulling is nothing, every process can be seen."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perilune.bundle.freeze import attempt_copy
from perilune.bundle.storage import remove_tree, storage_errors
from perilune.errors import RequestError
from perilune.execution.claim import Claim, claimed
from perilune.execution.launchers import process as launcher
from perilune.execution.observation import Observation, observe_files
from perilune.execution.placements.protocol import Assignment, Capabilities
from perilune.execution.processes import POLL_SECONDS, Presence
from perilune.execution.worker import STOP_GRACE
from perilune.files import write_json

NAME = "local"
START_TIMEOUT = 120.0  # seconds from a worker's start to its claim
EXIT_MARGIN = 10.0  # seconds a stopping worker may take beyond its task's grace, to hash what is there
# What the next attempt is given.
RESTORED = (
    "checkpoints", "episodes", "traces", "metrics.jsonl", "timings.jsonl", "reward_audit.json",
    "summary.json",
)  # fmt: skip


class LocalPlacement:
    """Runs attempts on this machine."""

    name = NAME
    launcher = launcher.NAME
    capabilities = Capabilities(elsewhere=False, look_every=0.0)

    def __init__(self) -> None:
        self._started: dict[Assignment, subprocess.Popen[bytes]] = {}
        self._since: dict[Assignment, float] = {}

    def stage(
        self, attempt: Assignment, bundle: Path, order: Mapping[str, Any], previous: Path | None
    ) -> None:
        """As `Placement.stage`; what a killed staging left is removed."""
        working_copy(bundle, attempt.directory, order, previous)

    def start(self, attempt: Assignment) -> None:
        """As `Placement.start`."""
        log = attempt.directory / "runtime" / "worker.log"
        command = launcher.worker_command(attempt.directory, attempt.epoch)
        self._started[attempt] = launcher.start_detached(command, log)
        self._since[attempt] = time.monotonic()

    def observe(self, attempt: Assignment) -> Observation:
        """As `Placement.observe`."""
        child = self._started.get(attempt)
        if child is not None:
            child.poll()  # takes its exit status, so that it does not linger as a zombie
        return observe_files(attempt.directory, attempt.epoch)

    def starting(self, attempt: Assignment) -> bool:
        """As `Placement.starting`; a worker that takes too long to claim is ended."""
        child = self._started.get(attempt)
        if child is None or child.poll() is not None:
            return False
        is_late = time.monotonic() - self._since[attempt] > START_TIMEOUT
        if is_late and observe_files(attempt.directory, attempt.epoch).claim is None:
            child.kill()
        return True

    def pull(self, attempt: Assignment, *, whole: bool = False) -> None:
        """Nothing: it lies here."""

    def remove(self, attempt: Assignment) -> None:
        """Nothing: what it holds is its evidence."""

    def stop(self, attempt: Assignment) -> bool:
        """As `Placement.stop`."""
        child = self._started.pop(attempt, None)
        claim = observe_files(attempt.directory, attempt.epoch).claim or invalidate_claim(
            attempt.directory, attempt.epoch
        )
        if claim is None:
            return True
        worker = claim.process

        def gone() -> bool:
            if child is not None:
                child.poll()
            return worker.presence() is Presence.ABSENT

        if worker.presence() is Presence.UNKNOWN:
            return False
        worker.send(signal.SIGTERM)
        if not _within(STOP_GRACE + EXIT_MARGIN, gone):
            worker.send(signal.SIGKILL)
            if not _within(EXIT_MARGIN, gone):
                return False
        return claim.end_remaining_processes()


def working_copy(bundle: Path, directory: Path, order: Mapping[str, Any], previous: Path | None) -> None:
    """Make an attempt's working copy at `directory`, whole or not at all, in place of what is there.

    Args:
        order, previous: as for `Placement.stage`.

    Raises:
        RequestError: when the bundle is not what was frozen, or the disk is full.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with storage_errors("stage the bundle", directory):
        for leftover in (directory, *directory.parent.glob(f".{directory.name}.*.tmp")):
            if leftover.exists():
                remove_tree(leftover)
        attempt_copy(bundle, directory)
        if previous is not None:
            restore_outputs(previous / "artifacts", directory / "artifacts")
        write_json(directory / "runtime" / "run.json", order)


def restore_outputs(previous: Path, artifacts: Path) -> None:
    """Copy what a dead attempt had finished: complete checkpoints, episodes and figures.

    What is being written has a name that begins with a dot or ends in ".tmp", and stays behind.
    """
    unfinished = shutil.ignore_patterns(".*", "*.tmp")
    for name in RESTORED:
        source = previous / name
        if source.is_dir():
            shutil.copytree(source, artifacts / name, ignore=unfinished, dirs_exist_ok=True)
        elif source.is_file():
            shutil.copyfile(source, artifacts / name)


def invalidate_claim(attempt: Path, epoch: int) -> Claim | None:
    """Claim an attempt that no worker has claimed, so that none ever can; or the claim that came first."""
    if not attempt.is_dir():
        return None
    with contextlib.suppress(RequestError), claimed(attempt, epoch):
        return None
    return observe_files(attempt, epoch).claim


def _within(seconds: float, happened: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
