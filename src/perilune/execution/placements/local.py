"""Placement `local`: attempts on this machine. Staging is a copy, and pulling does nothing."""

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from perilune.bundle.freeze import copy_for_attempt
from perilune.bundle.storage import remove_tree, storage_errors
from perilune.errors import RequestError
from perilune.execution.claim import Claim, hold_claim
from perilune.execution.launchers import process as launcher
from perilune.execution.observation import Observation, observe_files
from perilune.execution.placements.protocol import Assignment, Capabilities, StagingRequest
from perilune.execution.processes import POLL_SECONDS, Presence
from perilune.execution.worker import STOP_GRACE_S
from perilune.files import write_json

NAME = "local"
START_TIMEOUT_S = 120.0  # seconds from a worker's start to its claim
EXIT_MARGIN_S = 10.0  # seconds that a stopping worker needs to hash outputs, after the grace period
# Outputs of an earlier attempt that the next one continues from.
RESTORED_PATHS = (
    *("checkpoints", "episodes", "traces", "metrics.jsonl"),
    *("evaluations.jsonl", "schedule.jsonl", "timings.jsonl", "reward_audit.json", "summary.json"),
)


class LocalPlacement:
    """Runs attempts on this machine."""

    name = NAME
    launcher = launcher.NAME
    capabilities = Capabilities(is_remote=False, look_interval_s=0.0)

    def __init__(self) -> None:
        self._started: dict[Assignment, subprocess.Popen[bytes]] = {}
        self._started_at: dict[Assignment, float] = {}  # on the monotonic clock

    def stage(self, attempt: Assignment, request: StagingRequest) -> str:
        """Implement `Placement.stage`; removes the remains of a killed staging."""
        create_working_copy(request, attempt.directory)
        return ""

    def start(self, attempt: Assignment) -> None:
        log = attempt.directory / "runtime" / "worker.log"
        command = launcher.worker_command(attempt.directory, attempt.epoch)
        self._started[attempt] = launcher.start_detached(command, log)
        self._started_at[attempt] = time.monotonic()

    def observe(self, attempt: Assignment) -> Observation:
        child = self._started.get(attempt)
        if child is not None:
            child.poll()  # collect its exit status, so that it does not stay a zombie
        return observe_files(attempt.directory, attempt.epoch)

    def is_starting(self, attempt: Assignment) -> bool:
        """Implement `Placement.is_starting`; kills a worker that takes too long to claim."""
        child = self._started.get(attempt)
        if child is None or child.poll() is not None:
            return False
        is_late = time.monotonic() - self._started_at[attempt] > START_TIMEOUT_S
        if is_late and observe_files(attempt.directory, attempt.epoch).claim is None:
            child.kill()
        return True

    def pull(self, attempt: Assignment, *, whole: bool = False) -> None:
        """Nothing to do: the files are on this machine."""

    def remove(self, attempt: Assignment) -> None:
        """Nothing to do: all files are evidence."""

    def stop(self, attempt: Assignment) -> bool:
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
        if not _happens_within(STOP_GRACE_S + EXIT_MARGIN_S, gone):
            worker.send(signal.SIGKILL)
            if not _happens_within(EXIT_MARGIN_S, gone):
                return False
        return claim.end_remaining_processes()


def create_working_copy(request: StagingRequest, directory: Path) -> None:
    """Create an attempt's working copy at `directory`, completely or not at all, replacing what is there.

    Raises:
        RequestError: the bundle differs from what was frozen, or the disk is full.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with storage_errors("stage the bundle", directory):
        for stale in (directory, *directory.parent.glob(f".{directory.name}.*.tmp")):
            if stale.exists():
                remove_tree(stale)
        copy_for_attempt(request.bundle, directory)
        if request.previous is not None:
            restore_outputs(request.previous.directory / "artifacts", directory / "artifacts")
        write_json(directory / "runtime" / "run.json", request.run_info)


def restore_outputs(previous: Path, artifacts: Path) -> None:
    """Copy the finished outputs of an earlier attempt: complete checkpoints, episodes and metrics.

    Unfinished files, whose names begin with a dot or end in ".tmp", are not copied.
    """
    unfinished = shutil.ignore_patterns(".*", "*.tmp")
    for name in RESTORED_PATHS:
        source = previous / name
        if source.is_dir():
            shutil.copytree(source, artifacts / name, ignore=unfinished, dirs_exist_ok=True)
        elif source.is_file():
            shutil.copyfile(source, artifacts / name)


def invalidate_claim(attempt: Path, epoch: int) -> Claim | None:
    """Claim an unclaimed attempt, so that no worker can start it.

    Returns:
        The claim of a worker that was faster; None if no worker can start the attempt.
    """
    if not attempt.is_dir():
        return None
    with contextlib.suppress(RequestError), hold_claim(attempt, epoch):
        return None
    return observe_files(attempt, epoch).claim


def _happens_within(seconds: float, happened: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
