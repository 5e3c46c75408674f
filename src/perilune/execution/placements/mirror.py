"""The local copy of an attempt's files on another machine, transferred in frames and resumable.

The cursor (the progress of each file) is written after the bytes it covers are durable. Growing files are
truncated to the cursor and appended to in place; other files, and whole checkpoints, get their name once they
are complete. Frames are untrusted until they have been checked.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from perilune.bundle.remote.runner import stays_on_machine
from perilune.bundle.storage import storage_errors
from perilune.errors import RequestError, WorkFailedError
from perilune.execution.hosts.protocol import HostRefusedError
from perilune.files import (
    canonical_json,
    fsync_directory,
    is_inside_root,
    locked,
    read_json,
    read_json_or_empty,
    sha256_bytes,
    sha256_file,
    write_atomic,
)

MAX_FRAME_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 24  # of the line of JSON before a frame, or at the end of a transfer
MANIFEST, RESULT = "artifacts/manifest.json", "runtime/result.json"
CHECKPOINTS_FOLDER = "artifacts/checkpoints"
MIRRORED_FOLDERS = ("runtime", "artifacts")

Bring = Literal["metrics", "final", "all"]
"""The checkpoints to fetch: none ("metrics"), the final and best weights, or also those to resume from."""


@dataclass(frozen=True, slots=True)
class PullResult:
    """The result of one pull: whether its end arrived, and whether the machine has more."""

    ended: bool
    more: bool


class Mirror:
    """The local copy in `directory` of the files of one attempt.

    Args:
        bring: the checkpoints to fetch.
        rescue: whether to fetch the checkpoints to resume from if the attempt ends early, because its machine
            goes away.
    """

    def __init__(
        self,
        directory: Path,
        folders: Sequence[str] = MIRRORED_FOLDERS,
        bring: Bring = "all",
        *,
        rescue: bool = False,
    ) -> None:
        self.directory, self.folders, self.bring, self.rescue = directory, folders, bring, rescue
        self._arriving = directory.with_name(f".{directory.name}.arriving")
        self._cursor_file = directory.with_name(f"{directory.name}.pulled.json")
        # By path: inode, mtime in ns, number of bytes here, and digest of the last bytes.
        self._cursor: dict[str, list[Any]] = (
            read_json(self._cursor_file) if self._cursor_file.exists() else {}
        )

    def reset(self) -> None:
        """Forget the progress of an earlier staging."""
        self._cursor = {}
        self._cursor_file.unlink(missing_ok=True)
        shutil.rmtree(self._arriving, ignore_errors=True)

    def state(self) -> dict[str, Any]:
        """Return the request to the machine: the files that are here, and those to send."""
        asked = {"folders": list(self.folders), "bring": self.bring, "rescue": self.rescue}
        return {"files": self._cursor, "units": self._units(), **asked}

    def take(self, frames: BinaryIO) -> PullResult:
        """Write the files that arrive, up to the first incomplete or damaged frame.

        Raises:
            HostRefusedError: a frame names a path outside the attempt.
            RequestError: this disk is full. Frames that were written before stay.
        """
        before = canonical_json(self._cursor)
        with storage_errors("keep what a machine sent", self.directory):
            try:
                while header := self._header(frames):
                    if "end" in header:
                        self._complete_units(header["units"])
                        return PullResult(True, bool(header["more"]))
                    data = frames.read(min(max(int(header["length"]), 0), MAX_FRAME_BYTES))
                    if len(data) != header["length"] or sha256_bytes(data) != header["sha256"]:
                        break
                    self._put(header, data)
            except HostRefusedError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError):
                pass  # an incomplete line or nonsense counts as the end of the transfer
            finally:
                if (now := canonical_json(self._cursor)) != before:
                    write_atomic(self._cursor_file, now)
        return PullResult(False, True)

    def settle(self) -> None:
        """Make `artifacts/` match the manifest, then move manifest and result into place.

        Only files that stay on the machine may be missing.

        Raises:
            WorkFailedError: a file differs from the manifest; it is forgotten, and transferred again.
        """
        arrived = self._arriving / MANIFEST
        if not (self._arriving / RESULT).exists():  # another process moved it into place, and was killed
            self._forget(MANIFEST)
            self._forget(RESULT)
            raise WorkFailedError(f"{RESULT} has to be transferred again")
        result = read_json_or_empty(self._arriving / RESULT)  # the control plane refuses a damaged one
        with storage_errors("keep the evidence", self.directory):
            if result.get("manifest_digest") is not None and "artifacts" in self.folders:
                if not arrived.exists() or sha256_file(arrived) != result["manifest_digest"]:
                    self._forget(MANIFEST)
                    raise WorkFailedError(f"{MANIFEST} does not have the digest in the verdict")
                try:
                    self._check(read_json(arrived)["files"])
                except HostRefusedError:
                    raise
                except (RequestError, KeyError, TypeError, AttributeError):
                    raise WorkFailedError(f"{MANIFEST} is malformed") from None
                self._place(arrived, self.directory / MANIFEST)
            self._place(self._arriving / RESULT, self.directory / RESULT)
        shutil.rmtree(self._arriving, ignore_errors=True)

    def _check(self, listed: dict[str, Any]) -> None:
        """Compare every artifact with the manifest, and delete files that it does not list."""
        artifacts = self.directory / "artifacts"
        wrong = []
        for relative, entry in listed.items():
            path = self.directory / _validate_path(f"artifacts/{relative}")
            if stays_on_machine(f"artifacts/{relative}", self.bring) and not path.exists():
                continue
            whole = path.is_file() and path.stat().st_size == entry["size"]
            if not whole or sha256_file(path) != entry["sha256"]:
                self._forget(f"artifacts/{relative}")
                wrong.append(relative)
        if wrong:
            raise WorkFailedError(f"artifacts/{wrong[0]} differs from the manifest")
        for path in sorted(artifacts.rglob("*"), reverse=True):
            if path.is_file() and path.relative_to(artifacts).as_posix() not in listed:
                path.unlink()
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()

    def _forget(self, path: str) -> None:
        """Forget a file, and the checkpoint it belongs to, so that it is transferred again."""
        self._cursor.pop(path, None)
        (self._arriving / path).unlink(missing_ok=True)
        if unit := _checkpoint_of(path):
            shutil.rmtree(self.directory / CHECKPOINTS_FOLDER / unit, ignore_errors=True)
            self._cursor = {path: mark for path, mark in self._cursor.items() if _checkpoint_of(path) != unit}
        write_atomic(self._cursor_file, canonical_json(self._cursor))

    def _header(self, frames: BinaryIO) -> dict[str, Any] | None:
        line = frames.readline(MAX_HEADER_BYTES)
        return dict(json.loads(line)) if line.endswith(b"\n") else None

    def _put(self, header: dict[str, Any], data: bytes) -> None:
        path, offset = _validate_path(header["path"]), int(header["offset"])
        if offset < 0:
            raise HostRefusedError(f"it sent a frame at the negative offset {offset}")
        status, tail = [int(header["ino"]), int(header["mtime"])], str(header["tail"])
        known = self._cursor.get(path)
        if offset and (known is None or known[0] != status[0] or known[2] != offset):
            return  # the frame does not continue the file that is here
        here, arriving = self.directory / path, self._arriving / path
        in_place = offset > 0 and not arriving.exists()
        target = here if in_place else arriving
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("r+b" if offset else "wb") as file:
            file.truncate(offset)
            file.seek(offset)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        end = offset + len(data)
        self._cursor[path] = [*status, end, tail]
        is_whole = end >= int(header["size"])
        if is_whole and not in_place and path not in {MANIFEST, RESULT} and not _checkpoint_of(path):
            self._place(arriving, here)

    def _place(self, arrived: Path, here: Path) -> None:
        here.parent.mkdir(parents=True, exist_ok=True)
        arrived.replace(here)
        fsync_directory(here.parent)

    def _units(self) -> list[str]:
        folder = self.directory / CHECKPOINTS_FOLDER
        return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []

    def _complete_units(self, units: dict[str, dict[str, int]]) -> None:
        """Rename complete checkpoints into place; then delete those that the machine has deleted."""
        for name, files in units.items():
            unit = _validate_path(f"{CHECKPOINTS_FOLDER}/{name}")
            if (self.directory / unit).exists() or not files:
                continue
            paths = {_validate_path(f"{unit}/{inside}"): size for inside, size in files.items()}
            if all(_size(self._arriving / path) == size for path, size in paths.items()):
                self._place(self._arriving / unit, self.directory / unit)
        here_now = set(self._units())
        if units and here_now >= units.keys():
            for name in here_now - units.keys():
                shutil.rmtree(self.directory / CHECKPOINTS_FOLDER / name)


@contextmanager
def open_mirror(
    directory: Path,
    folders: Sequence[str] = MIRRORED_FOLDERS,
    bring: Bring = "all",
    *,
    rescue: bool = False,
    patience: float = 0.0,
) -> Iterator[Mirror | None]:
    """Yield the mirror of an attempt, for one process at a time: every observation may transfer files.

    Args:
        folders, bring, rescue: as for `Mirror`.
        patience: seconds to wait for another process.

    Yields:
        None if another process holds it, or its directory does not exist yet.
    """
    with locked(directory.with_name(f".{directory.name}.lock"), wait=patience) as acquired:
        yield Mirror(directory, folders, bring, rescue=rescue) if acquired else None


def _checkpoint_of(path: str) -> str:
    """Return the name of the checkpoint that a file belongs to; "" if none."""
    parts = path.split("/")
    return parts[2] if path.startswith(f"{CHECKPOINTS_FOLDER}/") and len(parts) > 3 else ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _validate_path(path: Any) -> str:
    """Return a relative path below runtime/ or artifacts/.

    Raises:
        HostRefusedError: it is anything else.
    """
    if isinstance(path, str) and is_inside_root(path):
        folder, _, rest = path.partition("/")
        if folder in MIRRORED_FOLDERS and rest:
            return path
    raise HostRefusedError(f"it sent a file for {str(path)[:200]!r}, which is outside an attempt")
