"""An artifact store: a folder, a bucket or anything else that fsspec supports, for evidence of runs.

```
sha256/ab/ab12...   contents, each stored once
runs/RUN.json       the files of a run: path to SHA-256, size and mode; written last
```

Uploads are checked against the signatures, and downloads against the hashes in the list.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.bundle.digest import walk
from perilune.bundle.verify import frozen_and_artifact_hashes
from perilune.control.evidence.verification import export
from perilune.control.record.home import Home
from perilune.control.record.store import Run
from perilune.control.runs.experiments import Control
from perilune.errors import RequestError, WorkFailedError, requires_extra
from perilune.files import canonical_json, is_inside_root, sha256_file

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

URL_VARIABLE = "PERILUNE_ARTIFACTS"
MAX_TRANSFERS = 8  # concurrent transfers
BLOCK_BYTES = 1 << 20


class ArtifactStore:
    """A store of evidence at a URL.

    Args:
        url: an fsspec URL ("s3://bucket/folder", "/mnt/share"); the backend finds its own credentials.

    Raises:
        RequestError: fsspec, or a package that it needs for this URL, is missing.
    """

    def __init__(self, url: str) -> None:
        with requires_extra("artifacts", "an artifact store needs a package"):
            import fsspec
        self.url = url
        self._fs: AbstractFileSystem
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise RequestError(f"the artifact store cannot be opened: {error}", where=url) from None
        self._root = root.rstrip("/")
        self._has_failed = False  # after a failed transfer or Ctrl-C, the other transfers stop

    @classmethod
    def open(cls, url: str | None) -> ArtifactStore:
        """Return the store at `url`, or else at the URL in PERILUNE_ARTIFACTS."""
        address = url or os.environ.get(URL_VARIABLE)
        if not address:
            raise RequestError(
                "no artifact store is given", remedy=f"--store URL, or export {URL_VARIABLE}=URL"
            )
        return cls(address)

    def runs(self) -> list[str]:
        """Return the ids of the stored runs, sorted."""
        with self._store_errors():
            folder = f"{self._root}/runs"
            names = self._fs.ls(folder, detail=False) if self._fs.exists(folder) else []
        return sorted(Path(name).stem for name in names if name.endswith(".json"))

    def push(self, control: Control, run: Run) -> int:
        """Upload a succeeded run's evidence; returns the bytes sent. Skips contents that are already stored.

        Raises:
            RequestError: the run has not succeeded, or its evidence is damaged.
            WorkFailedError: the store rejects the upload.
        """
        with control.home.scratch() as scratch:
            folder = scratch / "export"
            export(control, run, folder)
            files = dict(_list_entries(folder, frozen_and_artifact_hashes(folder / "bundle")))
            sent = sum(self._transfer_each(lambda name: self._upload(folder / name, files[name]), files))
            index = canonical_json({"run": run.id, "stage": run.stage, "files": files})
            with self._store_errors():
                self._write(f"{self._root}/runs/{run.id}.json", lambda file: file.write(index))
        return sent

    def pull(self, home: Home, run_id: str, destination: Path) -> int:
        """Download a run's evidence to a new folder, as `perilune export` lays it out.

        Returns:
            The number of files.

        Raises:
            RequestError: the run is not stored, or `destination` exists.
            WorkFailedError: the list is damaged, or a file does not have the hash in it.
        """
        files = self._read_index(run_id)
        with home.new_folder("store the pulled files", destination) as building:
            list(self._transfer_each(lambda name: self._download(files[name], building / name), files))
        return len(files)

    def _read_index(self, run_id: str) -> dict[str, dict[str, Any]]:
        with self._store_errors():
            path = f"{self._root}/runs/{run_id}.json"
            if not run_id.isalnum() or not self._fs.exists(path):
                raise RequestError(
                    f"run {run_id} is not in the store", where=self.url, remedy="perilune artifacts list"
                )
            data = self._fs.cat_file(path)
        try:
            files: dict[str, dict[str, Any]] = json.loads(data)["files"]
            damaged = next((name for name, file in files.items() if not _is_entry(name, file)), None)
            problem = "" if damaged is None else f" at {damaged!r}"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = f" ({error})"
        if problem:
            raise WorkFailedError(
                f"the list of the run's files is damaged{problem}",
                where=path,
                remedy=f"perilune artifacts push {run_id}, in a home that has the run, writes it again",
            )
        return files

    def _transfer_each(self, work: Callable[[str], int], files: Iterable[str]) -> Iterator[int]:
        self._has_failed = False
        with ThreadPoolExecutor(MAX_TRANSFERS) as workers, self._store_errors():
            try:
                yield from workers.map(work, files)
            except BaseException:
                self._has_failed = True
                raise

    def _read_blocks(self, source: Any) -> Iterator[bytes]:
        while block := source.read(BLOCK_BYTES):
            if self._has_failed:
                raise WorkFailedError("the transfer was stopped", where=self.url)
            yield block

    def _object_path(self, sha256: str) -> str:
        return f"{self._root}/sha256/{sha256[:2]}/{sha256}"

    def _upload(self, source: Path, file: Mapping[str, Any]) -> int:
        target = self._object_path(file["sha256"])
        if self._fs.exists(target) and self._fs.size(target) == file["size"]:
            return 0

        def copy(sink: Any) -> None:
            with source.open("rb") as reader:
                for block in self._read_blocks(reader):
                    sink.write(block)

        self._write(target, copy)
        return int(file["size"])

    def _write(self, target: str, fill: Callable[[Any], Any]) -> None:
        """Write to a temporary name, then rename."""
        temporary = f"{target}.{secrets.token_hex(4)}.tmp"
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        try:
            with self._fs.open(temporary, "wb") as sink:
                fill(sink)
            self._fs.mv(temporary, target)
        except BaseException:
            if self._fs.exists(temporary):
                self._fs.rm(temporary)
            raise

    def _download(self, file: Mapping[str, Any], destination: Path) -> int:
        destination.parent.mkdir(parents=True, exist_ok=True)
        digest, size = hashlib.sha256(), 0
        with self._fs.open(self._object_path(file["sha256"]), "rb") as source, destination.open("xb") as sink:
            for block in self._read_blocks(source):
                size += len(block)
                if size > file["size"]:
                    break
                digest.update(block)
                sink.write(block)
        if (size, digest.hexdigest()) != (file["size"], file["sha256"]):
            raise WorkFailedError(
                f"the stored content of {destination.name} is damaged",
                where=self.url,
                remedy="remove the damaged object, then push the run again from a home where it is intact",
            )
        destination.chmod(int(file["mode"], 8) & 0o777)
        return size

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, TimeoutError) as error:
            raise WorkFailedError(
                f"the artifact store failed: {error}",
                where=self.url,
                remedy="run the command again; finished transfers are not repeated",
            ) from error


def _is_entry(name: str, file: Mapping[str, Any]) -> bool:
    """Return whether a list of files may contain this entry: a path inside, a size, a SHA-256 and a mode."""
    return (
        is_inside_root(name)
        and "\\" not in name
        and type(file["size"]) is int
        and re.fullmatch("[0-9a-f]{64}", file["sha256"]) is not None
        and re.fullmatch("[0-7]{4}", file["mode"]) is not None
    )


def _list_entries(folder: Path, known: Mapping[str, str]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yield the files of an exported folder; `known` has hashes that were verified during the export."""
    for name, status in walk(folder):
        path = folder / name
        if path.is_file():
            mode = f"{status.st_mode & 0o777:04o}"
            sha256 = known.get(name.removeprefix("bundle/")) if name.startswith("bundle/") else None
            yield name, {"sha256": sha256 or sha256_file(path), "size": status.st_size, "mode": mode}
