"""The home directory: where state, experiments, bundles and attempts lie."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from perilune.bundle.storage import remove_tree
from perilune.control.record.faults import reached
from perilune.control.record.ids import new_ulid
from perilune.errors import RequestError

SWEEP_AFTER = 60.0  # seconds; a maker has locked its directory long before
BUILDING = "building"  # in a scratch directory: the path of what its maker builds elsewhere
RESERVE, RESERVED = "reserve", 1 << 19  # file that keeps so many bytes for `perilune gc` on a full disk
ROOMY = 64 << 20  # bytes that are free where the reserve is made


@dataclass(frozen=True, slots=True)
class Home:
    """Paths under one home.

    ```
    state.db                       what was wanted and what was seen
    experiments/<id>/              the recipe as submitted
    runs/<run>/bundle/             frozen, read-only
    runs/<run>/attempts/<N>/       working copy of the bundle, with what attempt N observed
    runs/<run>/attestations/       signed statements about the bundle and about what attempts made of it
    keys/                          what they are signed with
    tmp/<nonce>/                   being made; renamed into place when whole
    ```
    """

    root: Path

    @classmethod
    def open(cls, root: Path | None = None) -> Home:
        """Open, and where needed make, the home at `root`, else $PERILUNE_HOME, else ~/.perilune.

        Raises:
            RequestError: when it cannot be written to.
        """
        home = cls.chosen(root)
        try:
            for directory in (home.experiments, home.runs, home.temporary):
                directory.mkdir(parents=True, exist_ok=True)
            probe = home.temporary / f".{new_ulid()}"
            probe.touch()
            probe.unlink()
            home.keep_reserve()
        except OSError as error:
            raise RequestError(
                f"cannot write to the home directory ({error.strerror or error})",
                where=str(home.root),
                remedy="point PERILUNE_HOME at a directory that can be written to",
            ) from None
        return home

    @classmethod
    def chosen(cls, root: Path | None = None) -> Home:
        """The home at `root`, else $PERILUNE_HOME, else ~/.perilune; nothing is made."""
        found = root or Path(os.environ.get("PERILUNE_HOME") or "~/.perilune")
        return cls(found.expanduser().absolute())

    @property
    def database(self) -> Path:
        """The SQLite file."""
        return self.root / "state.db"

    @property
    def experiments(self) -> Path:
        """One directory an experiment."""
        return self.root / "experiments"

    @property
    def runs(self) -> Path:
        """One directory a run."""
        return self.root / "runs"

    @property
    def keys(self) -> Path:
        """What the controller signs with."""
        return self.root / "keys"

    @property
    def daemon(self) -> Path:
        """What the daemon holds the lock of."""
        return self.root / "daemon"

    @property
    def temporary(self) -> Path:
        """Directories being made, on the same file system as what they become."""
        return self.root / "tmp"

    def experiment(self, experiment_id: str) -> Path:
        """Directory of an experiment."""
        return self.experiments / experiment_id

    def run(self, run_id: str) -> Path:
        """Directory of a run."""
        return self.runs / run_id

    def bundle(self, run_id: str) -> Path:
        """The frozen bundle of a run."""
        return self.run(run_id) / "bundle"

    def attempt(self, run_id: str, number: int) -> Path:
        """Working copy of the bundle in which attempt `number` runs."""
        return self.run(run_id) / "attempts" / str(number)

    def newest_attempt(self, run_id: str) -> int:
        """The highest number of an attempt that has a directory; 0 for none."""
        attempts = self.run(run_id) / "attempts"
        numbers = (
            [int(path.name) for path in attempts.iterdir() if path.name.isdecimal()]
            if attempts.is_dir()
            else []
        )
        return max(numbers, default=0)

    def keep_reserve(self) -> None:
        """Keep some room on a disk that has plenty, with which a record can be written once it is full."""
        path = self.root / RESERVE
        if not path.exists() and shutil.disk_usage(self.root).free > ROOMY:
            with contextlib.suppress(OSError):  # a quota or limit; the record says so
                path.write_bytes(bytes(RESERVED))

    def release_reserve(self) -> None:
        """Give that room back when the disk is full."""
        if self.root.is_dir() and shutil.disk_usage(self.root).free < RESERVED:
            (self.root / RESERVE).unlink(missing_ok=True)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A new directory to prepare something in, locked until the block ends, then removed if still there.

        Whoever renames it away keeps it (and the lock, until the block ends). One left by a killed
        process is recognised by its free lock and swept.
        """
        path = self.temporary / new_ulid()
        path.mkdir()
        try:
            with locked(path, wait=True):
                yield path
        finally:
            if path.exists():
                remove_tree(path)

    def discard(self, path: Path) -> bool:
        """Rename a folder into `tmp`, then delete it; False when there is none.

        A kill leaves it whole, or in `tmp`, where the next command sweeps it.
        """
        with self.scratch() as scratch:
            try:
                path.rename(scratch / path.name)
            except FileNotFoundError:
                return False
            reached("remove.renamed")
        return True

    def sweep(self) -> None:
        """Remove what killed commands left: scratch directories, what they built elsewhere, partial files."""
        for path in self.temporary.iterdir():
            if path.is_dir() and _is_old(path, SWEEP_AFTER):
                with locked(path) as mine:
                    if mine:
                        _remove_built_elsewhere(path)
                        remove_tree(path)
        for folder in (".", "keys", "experiments/*"):
            for path in self.root.glob(f"{folder}/.*.tmp"):
                if path.is_file() and _is_old(path, SWEEP_AFTER):
                    path.unlink(missing_ok=True)
        for path in self.root.parent.glob(f".{self.root.name}.????????.tmp"):  # a restore to this place
            if path.is_dir() and _is_old(path, 86_400.0):
                remove_tree(path)
        for path in self.experiments.iterdir():  # made in the transaction that records it
            if path.is_dir() and _is_old(path, SWEEP_AFTER) and not any(path.iterdir()):
                path.rmdir()


def _is_old(path: Path, seconds: float) -> bool:
    try:
        return time.time() - path.stat().st_mtime > seconds
    except FileNotFoundError:  # somebody else was quicker
        return False


def _remove_built_elsewhere(scratch: Path) -> None:
    """Remove the unfinished folder that the dead owner of a scratch directory was building."""
    note = scratch / BUILDING
    building = Path(note.read_text(encoding="utf-8")) if note.is_file() else None
    if building is not None and building.match(".*.tmp") and building.is_dir():
        remove_tree(building)


def has_daemon(home: Home) -> bool:
    """Whether a daemon looks after the home."""
    with locked(home.daemon) as mine:
        return not mine and home.daemon.is_dir()


@contextmanager
def locked(directory: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold the flock on `directory`/lock; yields whether it was got. The kernel frees it when we die."""
    try:
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except FileNotFoundError:  # swept meanwhile
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
