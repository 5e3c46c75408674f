"""Run a frozen bundle again, without recording a run, and compare its results with the first ones."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perilune.bundle.compare import Change, compare_artifacts, compare_runs
from perilune.bundle.freeze import copy_for_attempt
from perilune.bundle.verify import Difference, require_verified
from perilune.bundle.workspace import SCHEDULE
from perilune.control.evidence.attempt_evidence import worker_output
from perilune.control.evidence.attestation import removed_artifacts
from perilune.control.record.ids import new_ulid
from perilune.control.record.store import Run
from perilune.control.record.transitions import RunState
from perilune.control.runs.experiments import POLL_INTERVAL_S, Control, read_progress
from perilune.control.runs.progress import StageEvent, StageProgress
from perilune.errors import RequestError, WorkFailedError
from perilune.execution.launchers.process import worker_command
from perilune.execution.verdict import read_verdict


@dataclass(frozen=True, slots=True)
class Reproduced(StageEvent):
    """The second run has ended: its directory (None if it was identical) and the differences.

    Attributes:
        packages: packages that the second run loaded in another version, or with other files.
    """

    directory: Path | None
    differences: tuple[Difference, ...]
    packages: tuple[Change, ...] = ()


def reproduce_run(control: Control, run_id: str) -> Iterator[StageEvent]:
    """Run the frozen bundle of a succeeded run again and compare metrics, episodes and final checkpoint.

    Yields progress; the last event is Reproduced. The second run ends with this process. Its directory is
    kept if something differs or it fails, and removed if this process is killed.

    Raises:
        RequestError: the run has not succeeded, or its evidence is damaged.
        WorkFailedError: the second run failed.
    """
    run = control.run(run_id)
    if run.state != RunState.SUCCEEDED:
        raise RequestError(
            f"the run is {run.state}; only succeeded runs can be reproduced",
            where=f"run {run_id}",
            remedy=f"perilune explain {run_id}",
        )
    first = control.existing_directory(run)
    require_verified(first, run.bundle_digest, removed_artifacts(control.home, run_id, run.current_epoch))
    kept = control.home.run(run_id) / "reproductions" / new_ulid()
    with control.home.scratch() as scratch:
        again = scratch / "again"
        yield from _run_again(control, run, first, again)
        verdict = read_verdict(again / "runtime", 1)
        if verdict is None or not verdict.succeeded:
            message = verdict.message if verdict else worker_output(again)
            _keep(again, kept)
            raise WorkFailedError(
                f"the second run failed: {message}", where=str(kept), remedy="see its log in runtime/"
            )
        differences = tuple(compare_artifacts(first, again))
        packages = compare_runs(first, again).packages
        if differences:
            _keep(again, kept)
    yield Reproduced(run.stage, run_id, kept if differences else None, differences, packages)


def _keep(again: Path, kept: Path) -> None:
    kept.parent.mkdir(exist_ok=True)
    again.rename(kept)


def _run_again(control: Control, run: Run, first: Path, again: Path) -> Iterator[StageEvent]:
    copy_for_attempt(control.home.bundle(run.id), again)
    if (schedule := first / "artifacts" / SCHEDULE).exists():
        shutil.copyfile(schedule, again / "runtime" / SCHEDULE)  # an asynchronous run follows it
    with (again / "runtime" / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            [*worker_command(again, 1), "--tied"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield from _follow(worker, again, run.stage, run.id)
    finally:
        if worker.poll() is None:
            worker.terminate()
            worker.wait()


def _follow(worker: subprocess.Popen[bytes], attempt: Path, stage: str, run_id: str) -> Iterator[StageEvent]:
    last_progress = None
    while worker.poll() is None:
        progress = read_progress(attempt)
        if progress is not None and progress != last_progress:
            last_progress = progress
            yield StageProgress.of(stage, run_id, 1, progress)
        time.sleep(POLL_INTERVAL_S)
