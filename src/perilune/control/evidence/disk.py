"""Disk usage of a home, and removal of files that no run needs.

Bundles, the current attempt of each run, and the inputs of later stages are never removed. Every removal is
recorded first, then the folder is renamed and deleted. A kill in between leaves it complete, or in `tmp`,
which the next command sweeps.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select

from perilune.bundle.shared_files import INPUTS, WHEELS
from perilune.bundle.verify import manifest_hashes
from perilune.control.evidence.attestation import attest_removal
from perilune.control.record.faults import kill_point
from perilune.control.record.home import Home
from perilune.control.record.store import Attempt, Experiment, Run, record_event
from perilune.control.record.transitions import AttemptState, Cleanup, RunState
from perilune.control.runs.experiments import Control
from perilune.files import locked

CHECKPOINTS_FOLDER = Path("artifacts/checkpoints")
INTERMEDIATE_PATTERN = "step-*"  # checkpoints for resuming; later stages use `final`
ENVIRONMENTS_FOLDER, COMPLETE_FILE = "environments", "complete"  # of bootstrap.py, which touches `complete`


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """Disk usage of one run, in bytes; a file with several hard links counts once.

    Attributes:
        attempts: without their checkpoints.
        reproductions: kept directories of reproductions that differed or failed.
    """

    experiment: str
    stage: str
    run_id: str
    state: str
    bundle: int
    attempts: int
    checkpoints: int
    reproductions: int

    @property
    def bytes(self) -> int:
        return self.bundle + self.attempts + self.checkpoints + self.reproductions


@dataclass(frozen=True, slots=True)
class Removable:
    """Something that no run needs.

    Attributes:
        kind: "attempt", "checkpoints" or "environment".
        why: the reason why it can be removed.
        names: the intermediate checkpoints in `path` to remove; if empty, `path` itself is removed.
    """

    kind: str
    path: Path
    bytes: int
    why: str
    run_id: str = ""
    epoch: int = 0
    names: tuple[str, ...] = ()


def disk_usage(control: Control) -> list[DiskUsage]:
    """Return the disk usage of each run, the oldest first."""
    home, seen = control.home, set[tuple[int, int]]()
    with control.store.snapshot() as session:
        query = select(Run, Experiment.name).join(Experiment, Experiment.id == Run.experiment_id)
        rows = session.execute(query.order_by(Run.id)).all()
    usages = []
    for run, experiment in rows:
        bundle = disk_bytes(home.bundle(run.id), seen)
        attempts = sorted((home.run(run.id) / "attempts").glob("[0-9]*"))
        checkpoints = sum(disk_bytes(attempt / CHECKPOINTS_FOLDER, seen) for attempt in attempts)
        others = sum(disk_bytes(attempt, seen) for attempt in attempts)
        again = disk_bytes(home.run(run.id) / "reproductions", seen)
        usages.append(DiskUsage(experiment, run.stage, run.id, run.state, bundle, others, checkpoints, again))
    return usages


def other_usage(home: Home) -> dict[str, int]:
    """Return the bytes that belong to no run, by name in the home."""
    seen = set[tuple[int, int]]()
    return {
        path.name: disk_bytes(path, seen)
        for path in sorted(home.root.iterdir())
        if path.name not in {"runs", "lock", WHEELS, INPUTS}  # counted with the bundles that share them
    }


def find_removable(
    control: Control, *, checkpoints: bool = False, unused_days: float = 30.0
) -> list[Removable]:
    """Return the cleaned-up attempts that newer ones have replaced, and the unused environments.

    Args:
        checkpoints: also the intermediate checkpoints of succeeded runs.
        unused_days: days without use after which an environment can be removed.
    """
    removable = [*_find_replaced(control), *_find_unused(control.home, unused_days)]
    if checkpoints:
        removable += _find_intermediate(control)
    return removable


def remove_items(control: Control, chosen: Sequence[Removable]) -> Iterator[Removable]:
    """Remove the chosen items, and yield those that were removed; an item that is in use again stays."""
    for item in chosen:
        match item.kind:
            case "attempt":
                removed = _remove_attempt(control, item)
            case "checkpoints":
                removed = _remove_checkpoints(control, item)
            case _:
                removed = _remove_environment(control, item)
        if removed:
            yield item


def disk_bytes(path: Path, seen: set[tuple[int, int]]) -> int:
    """Return the bytes on disk of a file or tree without the files in `seen`, and add its files to `seen`."""
    total = 0
    paths = [path] if path.is_file() else path.rglob("*")
    for entry in paths:
        try:
            status = entry.lstat()
        except OSError:  # removed meanwhile
            continue
        if (status.st_dev, status.st_ino) not in seen:
            seen.add((status.st_dev, status.st_ino))
            total += status.st_blocks * 512
    return total


def _find_replaced(control: Control) -> Iterator[Removable]:
    with control.store.snapshot() as session:
        rows = session.execute(select(Attempt, Run).join(Run).order_by(Attempt.run_id, Attempt.number)).all()
    for attempt, run in rows:
        path = control.home.attempt(run.id, attempt.number)
        if _is_replaced(attempt, run) and path.is_dir():
            why = f"{attempt.state} and collected; the current attempt is {run.current_epoch}"
            yield Removable("attempt", path, disk_bytes(path, set()), why, run.id, attempt.number)


def _is_replaced(attempt: Attempt, run: Run) -> bool:
    """Return whether nothing needs the attempt. The next attempt of a live run starts from the last one."""
    ended = AttemptState(attempt.state).is_terminal and attempt.cleanup != Cleanup.PENDING
    needed = 0 if RunState(run.state).is_terminal else 1
    return ended and attempt.number < run.current_epoch - needed


def _remove_attempt(control: Control, item: Removable) -> bool:
    with locked(control.home.run(item.run_id) / "lock") as acquired:
        if not acquired:
            return False
        with control.store.transaction() as session:
            attempt = session.get_one(Attempt, (item.run_id, item.epoch))
            if not _is_replaced(attempt, session.get_one(Run, item.run_id)):
                return False
            record_event(session, "attempt.removed", run_id=item.run_id, epoch=item.epoch, bytes=item.bytes)
        kill_point("remove.recorded")
        return control.home.discard(item.path)


def _find_intermediate(control: Control) -> Iterator[Removable]:
    for run in control.store.read(select(Run).where(Run.state == RunState.SUCCEEDED.value).order_by(Run.id)):
        path = control.directory(run) / CHECKPOINTS_FOLDER
        if found := sorted(path.glob(INTERMEDIATE_PATTERN)):
            seen = set[tuple[int, int]]()
            size, names = sum(disk_bytes(item, seen) for item in found), tuple(item.name for item in found)
            why = "they serve only to resume training, and the run has succeeded"
            yield Removable("checkpoints", path, size, why, run.id, run.current_epoch, names)


def _remove_checkpoints(control: Control, item: Removable) -> bool:
    """Sign the removal first, because the files are part of the evidence."""
    below = tuple(f"{CHECKPOINTS_FOLDER}/{name}/" for name in item.names)
    hashes = manifest_hashes(control.home.attempt(item.run_id, item.epoch))
    files = {name: sha256 for name, sha256 in hashes.items() if name.startswith(below)}
    with locked(control.home.run(item.run_id) / "lock") as acquired:
        if not acquired or not files:
            return False
        attest_removal(control.home, item.run_id, item.epoch, files)
        with control.store.transaction() as session:
            detail = {"names": list(item.names), "files": len(files), "bytes": item.bytes}
            record_event(session, "checkpoints.removed", run_id=item.run_id, epoch=item.epoch, **detail)
        kill_point("remove.recorded")
        removed = [control.home.discard(item.path / name) for name in item.names]
        return all(removed)


def _find_unused(home: Home, days: float) -> Iterator[Removable]:
    for path in sorted((home.root / ENVIRONMENTS_FOLDER).glob("*")):
        if not path.is_dir() or _is_in_use(path):
            continue
        complete = path / COMPLETE_FILE
        idle = (time.time() - (complete if complete.exists() else path).stat().st_mtime) / 86_400
        if idle >= days:
            why = f"no bundle has used it for {idle:.0f} days"
            yield Removable("environment", path, disk_bytes(path, set()), why)


def _remove_environment(control: Control, item: Removable) -> bool:
    # scripts/bootstrap.py holds the lock while it checks or creates the environment.
    with locked(item.path.with_suffix(".lock")) as acquired:
        if not acquired or _is_in_use(item.path):
            return False
        with control.store.transaction() as session:
            record_event(session, "environment.removed", name=item.path.name, bytes=item.bytes)
        kill_point("remove.recorded")
        return control.home.discard(item.path)


def _is_in_use(environment: Path) -> bool:
    mark = os.fsencode(environment) + b"/"
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in process.read_bytes():
                return True
        except OSError:  # the process has ended
            continue
    return False
