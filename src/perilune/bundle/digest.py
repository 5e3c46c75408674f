"""Entries and digests of file trees."""

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from perilune.errors import RequestError
from perilune.files import canonical_json, read_json, sha256_bytes, sha256_file

FROZEN = ("inputs", "job.json", "scripts")  # covered by the digest of a bundle
OBSERVED = ("artifacts", "runtime")  # written by an attempt
BUNDLE_FILE = "bundle.json"  # the list of frozen entries, and their digest
SCHEMA_VERSION = 1


class Entry(NamedTuple):
    """One file: path relative to its root with "/" between parts, size in bytes, hex SHA-256, mode "0444"."""

    path: str
    size: int
    sha256: str
    mode: str


def walk(root: Path, prefix: str = "", skip: Collection[str] = ()) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the relative path and lstat of each file, link and empty directory below `root`.

    Never follows links. Entries of a directory are in order of their names.

    Args:
        prefix: the beginning of the paths.
        skip: names in `root` to omit.

    Raises:
        RequestError: when a name is not UTF-8.
    """
    with os.scandir(root) as entries:
        children = sorted((item for item in entries if item.name not in skip), key=lambda item: item.name)
    for child in children:
        try:
            child.name.encode()
        except UnicodeEncodeError:
            raise RequestError(
                f"a file name is not UTF-8: {child.name!r}", where=str(root), remedy="rename the file"
            ) from None
        path = prefix + child.name
        if child.is_dir(follow_symlinks=False):
            inside = list(walk(Path(child.path), path + "/"))
            yield from inside or [(path, child.stat(follow_symlinks=False))]
        else:
            yield path, child.stat(follow_symlinks=False)


def make_entry(path: Path, relative: str, status: os.stat_result) -> Entry:
    return Entry(relative, status.st_size, sha256_file(path), f"{stat.S_IMODE(status.st_mode):04o}")


def entries_digest(entries: Iterable[Entry]) -> str:
    """Return the SHA-256 of the canonical JSON of `entries`, sorted by path."""
    return sha256_bytes(canonical_json([entry._asdict() for entry in sorted(entries)]))


def frozen_entries(bundle: Path) -> list[Entry]:
    """Return the entries of the frozen files of a bundle as they are on disk now, sorted by path.

    Raises:
        RequestError: when an entry is neither a file nor a directory, or `job.json` is missing.
    """
    if not (bundle / "job.json").is_file():
        raise RequestError(
            "not a bundle: no job.json", where=str(bundle), remedy="give the folder of a bundle"
        )
    entries = []
    for relative, status in walk(bundle, skip=OBSERVED):
        if relative.split("/", 1)[0] not in FROZEN or stat.S_ISDIR(status.st_mode):
            continue
        if not stat.S_ISREG(status.st_mode):
            raise RequestError("a bundle may only contain plain files", where=str(bundle / relative))
        entries.append(make_entry(bundle / relative, relative, status))
    return sorted(entries)


def bundle_digest(bundle: Path) -> str:
    """Return the digest of a bundle, computed from its files and not read from bundle.json."""
    return entries_digest(frozen_entries(bundle))


def bundle_document(entries: Collection[Entry]) -> bytes:
    """Return the bytes of bundle.json: the frozen entries and their digest."""
    files = [entry._asdict() for entry in sorted(entries)]
    document = {"schema_version": SCHEMA_VERSION, "digest": entries_digest(entries), "files": files}
    return canonical_json(document) + b"\n"


def recorded_digest(bundle: Path) -> str:
    """Return the digest in bundle.json, which `verify` checks.

    Raises:
        RequestError: when bundle.json is missing or damaged.
    """
    document = read_json(bundle / BUNDLE_FILE)
    if not isinstance(document, dict) or not isinstance(document.get("digest"), str):
        raise RequestError("bundle.json has no digest", where=str(bundle), remedy="freeze the bundle again")
    digest: str = document["digest"]
    return digest


def source_files(source: Path) -> list[tuple[str, Path]]:
    """Return (relative path, file) of each file of an input, sorted; (".", source) if it is a file.

    Follows links inside `source`, and links from a snapshot in a Hugging Face cache (`snapshots/REVISION`) to
    its `blobs` folder.

    Raises:
        RequestError: when the input is missing, contains something other than files, or a link leads
            elsewhere.
    """
    if source.is_file():
        return [(".", source)]
    if not source.is_dir():
        raise RequestError("no such input", where=str(source), remedy="check the path")
    root = source.resolve()
    homes = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    files = []
    for relative, status in walk(source):
        path = source / relative
        if stat.S_ISDIR(status.st_mode):
            continue
        if stat.S_ISLNK(status.st_mode):
            path = path.resolve()
            if not path.is_file() or not any(path.is_relative_to(home) for home in homes):
                raise RequestError(
                    f"the link {relative} points outside the input or to nothing: {path}",
                    where=str(source),
                    remedy="replace the link by the file",
                )
        elif not stat.S_ISREG(status.st_mode):
            raise RequestError(
                f"{relative} is not a plain file", where=str(source), remedy="remove it from the folder"
            )
        files.append((relative, path))
    return sorted(files)


def contents_digest(contents: Iterable[tuple[str, str]]) -> str:
    """Return the SHA-256 over (relative path, hex SHA-256) pairs."""
    return sha256_bytes(canonical_json(sorted(list(pair) for pair in contents)))
