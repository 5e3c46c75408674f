"""What a home takes on disk, and removing what nothing needs any more.

Never removed: bundles, the attempt that stands for a run, and what stages after it take. Whatever goes is
recorded first, then renamed away, then deleted: a kill in between leaves it whole, or in `tmp`, where nobody
takes it for anything and the next command sweeps it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select

from perilune.bundle.verify import attested_hashes
from perilune.control.evidence.attestation import attest_removal
from perilune.control.record.faults import reached
from perilune.control.record.home import Home, locked
from perilune.control.record.store import Attempt, Experiment, Run, record
from perilune.control.record.transitions import AttemptState, Cleanup, RunState
from perilune.control.runs.experiments import Control
from perilune.control.runs.wheels import WHEELS

CHECKPOINTS = Path("artifacts/checkpoints")
INTERMEDIATE = "step-*"  # what training resumes from; later stages take `final`
ENVIRONMENTS, COMPLETE = "environments", "complete"  # as scripts/bootstrap.py makes them, and touches at use


@dataclass(frozen=True, slots=True)
class Use:
    """What one run takes, in bytes; a file that several places share counts once.

    Attributes:
        attempts: without their checkpoints.
        reproductions: that differed, and were kept.
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
        """All of it."""
        return self.bundle + self.attempts + self.checkpoints + self.reproductions


@dataclass(frozen=True, slots=True)
class Removable:
    """Something that nothing needs.

    Attributes:
        kind: "attempt", "checkpoints" or "environment".
        why: it may go.
        names: of the intermediate checkpoints in `path`, which goes itself where there are none.
    """

    kind: str
    path: Path
    bytes: int
    why: str
    run_id: str = ""
    epoch: int = 0
    names: tuple[str, ...] = ()


def uses(control: Control) -> list[Use]:
    """What each run takes, the oldest first."""
    home, seen = control.home, set[tuple[int, int]]()
    with control.store.snapshot() as session:
        query = select(Run, Experiment.name).join(Experiment, Experiment.id == Run.experiment_id)
        rows = session.execute(query.order_by(Run.id)).all()
    found = []
    for run, experiment in rows:
        bundle = size_of(home.bundle(run.id), seen)
        attempts = sorted((home.run(run.id) / "attempts").glob("[0-9]*"))
        checkpoints = sum(size_of(attempt / CHECKPOINTS, seen) for attempt in attempts)
        others = sum(size_of(attempt, seen) for attempt in attempts)
        again = size_of(home.run(run.id) / "reproductions", seen)
        found.append(Use(experiment, run.stage, run.id, run.state, bundle, others, checkpoints, again))
    return found


def others(home: Home) -> dict[str, int]:
    """What is no run's, by name in the home."""
    seen = set[tuple[int, int]]()
    return {
        path.name: size_of(path, seen)
        for path in sorted(home.root.iterdir())
        if path.name not in {"runs", "lock", WHEELS}  # bundles share the wheels
    }


def removable(control: Control, *, checkpoints: bool = False, unused_days: float = 30.0) -> list[Removable]:
    """What can go: ended and collected attempts that another has replaced, and environments out of use.

    Args:
        checkpoints: also the intermediate checkpoints of runs that have succeeded.
        unused_days: an environment that no bundle has begun in for so long.
    """
    found = [*_replaced(control), *_unused(control.home, unused_days)]
    if checkpoints:
        found += _intermediate(control)
    return found


def remove(control: Control, chosen: Sequence[Removable]) -> Iterator[Removable]:
    """Remove what may still go now, telling each; what has come into use meanwhile stays."""
    for one in chosen:
        match one.kind:
            case "attempt":
                gone = _remove_attempt(control, one)
            case "checkpoints":
                gone = _remove_checkpoints(control, one)
            case _:
                gone = _remove_environment(control, one)
        if gone:
            yield one


def size_of(path: Path, seen: set[tuple[int, int]]) -> int:
    """Bytes on disk of a file or tree, without files that `seen` holds already, to which it adds."""
    total = 0
    paths = [path] if path.is_file() else path.rglob("*")
    for one in paths:
        try:
            status = one.lstat()
        except OSError:  # gone meanwhile
            continue
        if (status.st_dev, status.st_ino) not in seen:
            seen.add((status.st_dev, status.st_ino))
            total += status.st_blocks * 512
    return total


def _replaced(control: Control) -> Iterator[Removable]:
    with control.store.snapshot() as session:
        rows = session.execute(select(Attempt, Run).join(Run).order_by(Attempt.run_id, Attempt.number)).all()
    for attempt, run in rows:
        path = control.home.attempt(run.id, attempt.number)
        if _is_replaced(attempt, run) and path.is_dir():
            why = f"{attempt.state} and collected; attempt {run.current_epoch} stands for the run"
            yield Removable("attempt", path, size_of(path, set()), why, run.id, attempt.number)


def _is_replaced(attempt: Attempt, run: Run) -> bool:
    """Whether nothing will be taken from the attempt any more. A live run's next one starts from the last."""
    ended = AttemptState(attempt.state).terminal and attempt.cleanup != Cleanup.PENDING
    needed = 0 if RunState(run.state).terminal else 1
    return ended and attempt.number < run.current_epoch - needed


def _remove_attempt(control: Control, one: Removable) -> bool:
    with locked(control.home.run(one.run_id)) as mine:
        if not mine:
            return False
        with control.store.transaction() as session:
            attempt = session.get_one(Attempt, (one.run_id, one.epoch))
            if not _is_replaced(attempt, session.get_one(Run, one.run_id)):
                return False
            record(session, "attempt.removed", run_id=one.run_id, epoch=one.epoch, bytes=one.bytes)
        reached("remove.recorded")
        return control.home.discard(one.path)


def _intermediate(control: Control) -> Iterator[Removable]:
    with control.store.snapshot() as session:
        runs = session.scalars(
            select(Run).where(Run.state == RunState.SUCCEEDED.value).order_by(Run.id)
        ).all()
    for run in runs:
        path = control.directory(run) / CHECKPOINTS
        if found := sorted(path.glob(INTERMEDIATE)):
            seen = set[tuple[int, int]]()
            size, names = sum(size_of(one, seen) for one in found), tuple(one.name for one in found)
            why = "training resumes from them, and the run has succeeded"
            yield Removable("checkpoints", path, size, why, run.id, run.current_epoch, names)


def _remove_checkpoints(control: Control, one: Removable) -> bool:
    """Their files are part of the evidence, so it is signed that they went on purpose, before they do."""
    below = tuple(f"{CHECKPOINTS}/{name}/" for name in one.names)
    hashes = attested_hashes(control.home.attempt(one.run_id, one.epoch))
    files = {name: sha256 for name, sha256 in hashes.items() if name.startswith(below)}
    with locked(control.home.run(one.run_id)) as mine:
        if not mine or not files:
            return False
        attest_removal(control.home, one.run_id, one.epoch, files)
        with control.store.transaction() as session:
            told = {"names": list(one.names), "files": len(files), "bytes": one.bytes}
            record(session, "checkpoints.removed", run_id=one.run_id, epoch=one.epoch, **told)
        reached("remove.recorded")
        gone = [control.home.discard(one.path / name) for name in one.names]
        return all(gone)


def _unused(home: Home, days: float) -> Iterator[Removable]:
    for path in sorted((home.root / ENVIRONMENTS).glob("*")):
        if not path.is_dir() or _in_use(path):
            continue
        complete = path / COMPLETE
        idle = (time.time() - (complete if complete.exists() else path).stat().st_mtime) / 86_400
        if idle >= days:
            yield Removable(
                "environment", path, size_of(path, set()), f"no bundle has begun in it for {idle:.0f} days"
            )


def _remove_environment(control: Control, one: Removable) -> bool:
    with _environment_lock(one.path) as mine:
        if not mine or _in_use(one.path):
            return False
        with control.store.transaction() as session:
            record(session, "environment.removed", name=one.path.name, bytes=one.bytes)
        reached("remove.recorded")
        return control.home.discard(one.path)


@contextmanager
def _environment_lock(environment: Path) -> Iterator[bool]:
    """The lock under which scripts/bootstrap.py looks at an environment and makes it."""
    with environment.with_suffix(".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _in_use(environment: Path) -> bool:
    """Whether a process was started with a program of the environment."""
    mark = os.fsencode(environment) + b"/"
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in process.read_bytes():
                return True
        except OSError:  # it has ended
            continue
    return False
