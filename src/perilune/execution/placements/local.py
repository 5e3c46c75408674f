"""Placement `local`: this machine. Staging is a copy, pulling is nothing, every process can be seen."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from perilune.bundle.freeze import attempt_copy
from perilune.bundle.storage import remove_tree, storage_errors
from perilune.errors import RequestError
from perilune.execution.claim import Claim, claimed
from perilune.execution.launchers import process as launcher
from perilune.execution.observation import Observation, observe_files
from perilune.execution.processes import POLL_SECONDS, Presence
from perilune.execution.worker import STOP_GRACE
from perilune.files import write_json

NAME = "local"
START_TIMEOUT = 120.0  # seconds from a worker's start to its claim
EXIT_MARGIN = 10.0  # seconds a stopping worker may take beyond its task's grace, to hash what is there
CARRIED = ("checkpoints", "episodes", "metrics.jsonl", "timings.jsonl")  # from a dead attempt to the next


class LocalPlacement:
    """Runs attempts on this machine."""

    name = NAME
    launcher = launcher.NAME

    def __init__(self) -> None:
        self._started: dict[tuple[Path, int], subprocess.Popen[bytes]] = {}
        self._since: dict[tuple[Path, int], float] = {}

    def stage(self, bundle: Path, attempt: Path, order: dict[str, object], previous: Path | None) -> None:
        """Make the attempt's working copy, whole or not at all; what a killed staging left is removed.

        Must not be called once a worker may have been started there.

        Args:
            bundle: the frozen bundle.
            attempt: directory of the attempt.
            order: what runtime/run.json tells the worker, with "bundle_digest".
            previous: directory of the attempt before, whose complete checkpoints and figures are carried on.

        Raises:
            RequestError: when the bundle is not what was frozen, or the disk is full.
        """
        attempt.parent.mkdir(parents=True, exist_ok=True)
        with storage_errors("stage the bundle", attempt):
            for leftover in (attempt, *attempt.parent.glob(f".{attempt.name}.*.tmp")):
                if leftover.exists():
                    remove_tree(leftover)
            attempt_copy(bundle, attempt)
            if previous is not None:
                carry_over(previous / "artifacts", attempt / "artifacts")
            write_json(attempt / "runtime" / "run.json", order)

    def start(self, attempt: Path, epoch: int) -> None:
        """Start a worker. Starting twice is harmless: only one can claim the attempt."""
        log = attempt / "runtime" / "worker.log"
        self._started[attempt, epoch] = launcher.start_detached(launcher.worker_command(attempt, epoch), log)
        self._since[attempt, epoch] = time.monotonic()

    def observe(self, attempt: Path, epoch: int) -> Observation:
        """Look at an attempt."""
        child = self._started.get((attempt, epoch))
        if child is not None:
            child.poll()  # takes its exit status, so that it does not linger as a zombie
        return observe_files(attempt, epoch)

    def starting(self, attempt: Path, epoch: int) -> bool:
        """Whether a worker that we started there still lives; one that takes too long to claim is ended."""
        child = self._started.get((attempt, epoch))
        if child is None or child.poll() is not None:
            return False
        is_late = time.monotonic() - self._since[attempt, epoch] > START_TIMEOUT
        if is_late and observe_files(attempt, epoch).claim is None:
            child.kill()
        return True

    def stop(self, attempt: Path, epoch: int, *, grace: float = STOP_GRACE + EXIT_MARGIN) -> bool:
        """End the attempt: ask the worker, wait, then kill it and all it started.

        Returns:
            True when it is proven that none of its processes is left.
        """
        child = self._started.pop((attempt, epoch), None)
        claim = observe_files(attempt, epoch).claim or _burn(attempt, epoch)
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
        if not _within(grace, gone):
            worker.send(signal.SIGKILL)
            if not _within(EXIT_MARGIN, gone):
                return False
        return claim.end_leftovers()


def carry_over(previous: Path, artifacts: Path) -> None:
    """Copy what a dead attempt had finished: complete checkpoints, episodes and figures.

    What is being written has a name that begins with a dot or ends in ".tmp", and stays behind.
    """
    unfinished = shutil.ignore_patterns(".*", "*.tmp")
    for name in CARRIED:
        source = previous / name
        if source.is_dir():
            shutil.copytree(source, artifacts / name, ignore=unfinished, dirs_exist_ok=True)
        elif source.is_file():
            shutil.copyfile(source, artifacts / name)


def _burn(attempt: Path, epoch: int) -> Claim | None:
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
