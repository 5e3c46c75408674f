"""The home: the directory with the database, experiments, bundles and attempts."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from perilune.bundle.storage import new_folder, remove_tree
from perilune.control.record.faults import kill_point
from perilune.control.record.ids import new_ulid
from perilune.errors import RequestError
from perilune.files import home_directory, locked

SWEEP_AGE_S = 60.0  # seconds; the process that created a directory has locked it long before
_BUILDING_FILE = "building"  # in a scratch directory: the path of the folder that its owner builds elsewhere
RESERVE_FILE, RESERVE_BYTES = "reserve", 1 << 19  # lets `perilune gc` run on a full disk
MIN_FREE_BYTES = 64 << 20  # free bytes that creating the reserve requires


@dataclass(frozen=True, slots=True)
class Home:
    """Paths in one home.

    ```
    state.db                       what was requested and what was observed
    experiments/<id>/              the recipe as submitted, and its overrides
    sweeps/<name>.json             the arms of a sweep, and their experiments
    runs/<run>/bundle/             frozen, read-only
    runs/<run>/attempts/<N>/       working copy of the bundle, with the results of attempt N
    runs/<run>/attestations/       signed statements about the bundle and the results of attempts
    inputs/, wheels/               one copy of large files that bundles share, named by SHA-256
    models/<name>/                 models that were fetched or converted
    keys/                          the signing keys
    tmp/<nonce>/                   under construction; renamed into place when complete
    ```
    """

    root: Path

    @classmethod
    def open(cls, root: Path | None = None) -> Home:
        """Open the home at `root`, $PERILUNE_HOME or ~/.perilune, and create it if necessary.

        Raises:
            RequestError: the home is not writable.
        """
        home = cls.locate(root)
        try:
            for directory in (home.experiments, home.runs, home.temporary):
                directory.mkdir(parents=True, exist_ok=True)
            probe = home.temporary / f".{new_ulid()}"
            probe.touch()
            probe.unlink()
            home.create_reserve()
        except OSError as error:
            raise RequestError(
                f"cannot write to the home directory ({error.strerror or error})",
                where=str(home.root),
                remedy="set PERILUNE_HOME to a writable directory; to see these runs, to a copy of it",
            ) from None
        return home

    @classmethod
    def locate(cls, root: Path | None = None) -> Home:
        """Return the home at `root`, $PERILUNE_HOME or ~/.perilune; creates nothing."""
        return cls(root.expanduser().absolute() if root else home_directory())

    @property
    def database(self) -> Path:
        return self.root / "state.db"

    @property
    def experiments(self) -> Path:
        return self.root / "experiments"

    @property
    def sweeps(self) -> Path:
        return self.root / "sweeps"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    @property
    def daemon(self) -> Path:
        """The directory whose lock a running daemon holds."""
        return self.root / "daemon"

    @property
    def temporary(self) -> Path:
        """Directories under construction, on the same file system as their destinations."""
        return self.root / "tmp"

    def experiment(self, experiment_id: str) -> Path:
        return self.experiments / experiment_id

    def run(self, run_id: str) -> Path:
        return self.runs / run_id

    def bundle(self, run_id: str) -> Path:
        return self.run(run_id) / "bundle"

    def attempt(self, run_id: str, number: int) -> Path:
        """Return the directory in which attempt `number` runs: a working copy of the bundle."""
        return self.run(run_id) / "attempts" / str(number)

    def newest_attempt(self, run_id: str) -> int:
        """Return the highest attempt number that has a directory; 0 if there is none."""
        return max(self.attempt_numbers(run_id), default=0)

    def attempt_numbers(self, run_id: str) -> list[int]:
        """Return the numbers of the attempts that have a directory, in order."""
        attempts = (self.run(run_id) / "attempts").glob("*")
        return sorted(int(path.name) for path in attempts if path.name.isdecimal())

    def create_reserve(self) -> None:
        """Reserve disk space, so that the database can still be written once the disk is full."""
        path = self.root / RESERVE_FILE
        if not path.exists() and shutil.disk_usage(self.root).free > MIN_FREE_BYTES:
            with contextlib.suppress(OSError):  # a quota or limit, which writing the database will report
                path.write_bytes(bytes(RESERVE_BYTES))

    def release_reserve(self) -> None:
        """Delete the reserve if the disk is full."""
        if self.root.is_dir() and shutil.disk_usage(self.root).free < RESERVE_BYTES:
            (self.root / RESERVE_FILE).unlink(missing_ok=True)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a new locked directory, removed at the end of the block if it is still there.

        The caller may rename it and so keep it; the lock lasts until the end of the block. A scratch
        directory whose lock is free was left by a killed process, and is swept.
        """
        path = self.temporary / new_ulid()
        path.mkdir()
        try:
            with locked(path / "lock", wait=math.inf):
                yield path
        finally:
            if path.exists():
                remove_tree(path)

    @contextmanager
    def new_folder(self, action: str, destination: Path) -> Iterator[Path]:
        """Yield a folder to fill, which is renamed to `destination` when the block succeeds.

        `destination` may be anywhere on the machine. If this process is killed, `sweep` removes the folder.

        Raises:
            RequestError: `destination` exists or cannot be written.
        """
        with self.scratch() as scratch, new_folder(action, destination) as building:
            (scratch / _BUILDING_FILE).write_text(str(building.absolute()), encoding="utf-8")
            yield building

    def discard(self, path: Path) -> bool:
        """Rename a folder into `tmp`, then delete it; False if there is none.

        A kill leaves it complete or in `tmp`, where the next command sweeps it.
        """
        with self.scratch() as scratch:
            try:
                path.rename(scratch / path.name)
            except FileNotFoundError:
                return False
            kill_point("remove.renamed")
        return True

    def sweep(self) -> None:
        """Remove files of killed commands: scratch directories, folders built elsewhere, partial files."""
        for path in self.temporary.iterdir():
            if path.is_dir() and _is_old(path, SWEEP_AGE_S):
                with locked(path / "lock") as acquired:
                    if acquired:
                        _remove_built_elsewhere(path)
                        remove_tree(path)
        for folder in (".", "keys", "experiments/*"):
            for path in self.root.glob(f"{folder}/.*.tmp"):
                if path.is_file() and _is_old(path, SWEEP_AGE_S):
                    path.unlink(missing_ok=True)
        for path in self.root.parent.glob(f".{self.root.name}.????????.tmp"):  # of a restore to this home
            if path.is_dir() and _is_old(path, 86_400.0):
                remove_tree(path)
        for path in self.experiments.iterdir():  # created in the transaction that records the experiment
            if path.is_dir() and _is_old(path, SWEEP_AGE_S) and not any(path.iterdir()):
                path.rmdir()


def _is_old(path: Path, seconds: float) -> bool:
    try:
        return time.time() - path.stat().st_mtime > seconds
    except FileNotFoundError:  # another process removed it
        return False


def _remove_built_elsewhere(scratch: Path) -> None:
    """Remove the unfinished folder that the dead owner of a scratch directory was building elsewhere."""
    note = scratch / _BUILDING_FILE
    building = Path(note.read_text(encoding="utf-8")) if note.is_file() else None
    if building is not None and building.match(".*.tmp") and building.is_dir():
        remove_tree(building)


def has_daemon(home: Home) -> bool:
    with locked(home.daemon / "lock", shared=True) as acquired:  # several commands may ask at once
        return not acquired and home.daemon.is_dir()


def announce_starter(home: Home, experiment_id: str) -> AbstractContextManager[bool]:
    """Announce that this process starts the later stages of an experiment, while the block lasts.

    The announcement is a shared lock, which ends with the process.
    """
    home.experiment(experiment_id).mkdir(parents=True, exist_ok=True)  # somebody may have deleted it
    return locked(home.experiment(experiment_id) / "lock", wait=math.inf, shared=True)


def has_starter(home: Home, experiment_id: str) -> bool:
    """Return whether a process is alive that starts the later stages of an experiment."""
    directory = home.experiment(experiment_id)
    with locked(directory / "lock") as alone:
        return not alone and directory.is_dir()
