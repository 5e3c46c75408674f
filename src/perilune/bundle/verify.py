"""Verifies the files of a bundle against its digest, manifest and result."""

import json
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from perilune.bundle.digest import (
    BUNDLE_FILE,
    FROZEN,
    OBSERVED,
    Entry,
    bundle_document,
    entries_digest,
    make_entry,
    walk,
)
from perilune.bundle.manifest import MANIFEST, manifest_bytes
from perilune.bundle.storage import storage_errors
from perilune.errors import RequestError
from perilune.files import sha256_file

Kind = Literal["changed", "missing", "extra", "mode", "type"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A file that differs: its path in the bundle, the kind of difference, and expected and actual values.

    `place` is the position in the file if it is known: "metrics at step 20, reward".
    """

    path: str
    kind: Kind
    expected: str = ""
    actual: str = ""
    place: str = ""

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        detail = f": expected {self.expected}, found {self.actual}" if self.expected and self.actual else ""
        return f"{self.path} {_DESCRIPTIONS[self.kind]}{place}{detail}"


_DESCRIPTIONS = {
    "changed": "has changed",
    "missing": "is missing",
    "extra": "was not there when the bundle was made",
    "mode": "has another mode",
    "type": "is not a plain file",
}


def verify(bundle: Path, expected: str | None = None, removed: Collection[str] = ()) -> list[Difference]:
    """Compare a bundle with bundle.json, its artifacts with the manifest, and the manifest with the result.

    Args:
        bundle: a frozen bundle or an attempt's copy of one.
        expected: the digest that the bundle must have, from another source. Without it, a bundle that was
            rewritten together with its bundle.json passes.
        removed: artifacts that may be missing because they were deleted on purpose.

    Returns:
        The differences, frozen files first, each part in order of path.

    Raises:
        RequestError: when `bundle` is not a directory or cannot be read.
    """
    if not bundle.is_dir():
        raise RequestError("not a bundle", where=str(bundle), remedy="give the folder that contains job.json")
    with storage_errors("read the bundle", bundle):
        differences = [*_frozen_differences(bundle, expected), *_artifact_differences(bundle)]
    return [diff for diff in differences if diff.kind != "missing" or diff.path not in removed]


def require_verified(bundle: Path, expected: str | None = None, removed: Collection[str] = ()) -> None:
    """Raise an error if a bundle differs.

    Raises:
        RequestError: with the first file that differs.
    """
    differences = verify(bundle, expected, removed)
    if differences:
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        raise RequestError(
            f"the bundle was changed: {differences[0]}{more}",
            where=str(bundle),
            remedy="fetch or freeze it again; `perilune bundle verify` lists the differences",
        )


def _frozen_differences(bundle: Path, expected: str | None) -> Iterator[Difference]:
    path = bundle / BUNDLE_FILE
    if not _is_plain(path):
        yield Difference(BUNDLE_FILE, "type" if os.path.lexists(path) else "missing")
        return
    data = path.read_bytes()
    recorded = _parse_entries(data)
    if recorded is None:
        yield Difference(BUNDLE_FILE, "changed")
        return
    digest = entries_digest(recorded.values())
    if expected is not None and digest != expected:
        yield Difference(BUNDLE_FILE, "changed", expected, digest)
    yield from _compare(bundle, recorded, _list_present(bundle))


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _parse_entries(data: bytes) -> dict[str, Entry] | None:
    """Return the entries of bundle.json, or None when its bytes are not exactly what freezing writes."""
    try:
        document = json.loads(data)
        entries = [Entry(**file) for file in document["files"]]
        exact = data == bundle_document(entries) and all(isinstance(entry.path, str) for entry in entries)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return {entry.path: entry for entry in entries} if exact else None


def _list_present(bundle: Path) -> dict[str, Any]:
    """Return the lstat of the frozen files, and of anything that does not belong in a bundle.

    The other folders are skipped, because a running task changes them.
    """
    return {
        path: status
        for path, status in walk(bundle, skip=OBSERVED)
        if not (path in FROZEN and stat.S_ISDIR(status.st_mode))
    }


def _compare(bundle: Path, recorded: dict[str, Entry], present: dict[str, Any]) -> Iterator[Difference]:
    for path in sorted(recorded.keys() | present.keys()):
        if path == BUNDLE_FILE:
            continue
        if path not in present:
            yield Difference(path, "missing")
        elif path not in recorded:
            yield Difference(path, "extra")
        elif not stat.S_ISREG(present[path].st_mode):
            yield Difference(path, "type")
        else:
            was, now = recorded[path], make_entry(bundle / path, path, present[path])
            if (was.size, was.sha256) != (now.size, now.sha256):
                yield Difference(path, "changed", f"sha256 {was.sha256}", now.sha256)
            elif was.mode != now.mode:
                yield Difference(path, "mode", was.mode, now.mode)


def _artifact_differences(bundle: Path) -> Iterator[Difference]:
    """Yield differences of artifacts/ from its manifest, and of the manifest from runtime/result.json."""
    path = bundle / "artifacts" / MANIFEST
    name = f"artifacts/{MANIFEST}"
    result = bundle / "runtime" / "result.json"
    expected_digest = _expected_manifest_digest(result) if os.path.lexists(result) else None
    if not _is_plain(path):
        exists = os.path.lexists(path)
        if exists or expected_digest is not None:
            yield Difference(name, "type" if exists else "missing")
        return
    if expected_digest is not None and sha256_file(path) != expected_digest:
        yield Difference(name, "changed", f"sha256 {expected_digest}", sha256_file(path))
    files = _manifest_files(path)
    if files is None:
        yield Difference(name, "changed")
        return
    yield from _compare_artifacts(bundle / "artifacts", files)


def _expected_manifest_digest(result: Path) -> str | None:
    """Return the digest in result.json; None if the attempt wrote no manifest, "" if the file is damaged."""
    if not _is_plain(result):
        return ""
    try:
        document = json.loads(result.read_bytes())
        digest = document["manifest_digest"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return digest if digest is None else str(digest)


def manifest_hashes(bundle: Path) -> dict[str, str]:
    """Return the SHA-256 of each artifact by its path in the bundle; empty if the manifest is invalid."""
    path = bundle / "artifacts" / MANIFEST
    files = _manifest_files(path) if path.is_file() else None
    return {f"artifacts/{name}": str(file["sha256"]) for name, file in (files or {}).items()}


def frozen_and_artifact_hashes(bundle: Path) -> dict[str, str]:
    """Return the SHA-256 of the frozen files and artifacts by path, from bundle.json and the manifest."""
    frozen = _parse_entries((bundle / BUNDLE_FILE).read_bytes()) or {}
    return {path: entry.sha256 for path, entry in frozen.items()} | manifest_hashes(bundle)


def _manifest_files(path: Path) -> dict[str, Any] | None:
    data = path.read_bytes()
    try:
        files: dict[str, Any] = json.loads(data)["files"]
        shaped = all(file.keys() == {"size", "sha256"} for file in files.values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return files if shaped and data == manifest_bytes(files) else None


def _compare_artifacts(artifacts: Path, files: dict[str, Any]) -> Iterator[Difference]:
    present = {path: status for path, status in walk(artifacts) if not stat.S_ISDIR(status.st_mode)}
    for path in sorted((files.keys() | present.keys()) - {MANIFEST}):
        name = f"artifacts/{path}"
        if path not in present:
            yield Difference(name, "missing")
        elif path not in files:
            yield Difference(name, "extra")
        elif not stat.S_ISREG(present[path].st_mode):
            yield Difference(name, "type")
        elif files[path]["size"] != present[path].st_size:
            yield Difference(name, "changed", f"{files[path]['size']} bytes", f"{present[path].st_size}")
        elif (digest := sha256_file(artifacts / path)) != files[path]["sha256"]:
            yield Difference(name, "changed", f"sha256 {files[path]['sha256']}", digest)
