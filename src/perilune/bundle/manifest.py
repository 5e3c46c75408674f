"""artifacts/manifest.json: the artifacts of an attempt. Written last, so its presence means completeness."""

import stat
from pathlib import Path
from typing import Any

from perilune.bundle.digest import make_entry, walk
from perilune.bundle.storage import storage_errors
from perilune.errors import RequestError, WorkFailedError
from perilune.files import canonical_json, read_json, sha256_bytes, write_atomic

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1


def write_manifest(bundle: Path) -> str:
    """Hash everything under artifacts/ and write artifacts/manifest.json; return the SHA-256 of that file.

    Raises:
        WorkFailedError: when an artifact is a link or a special file.
        RequestError: when the disk cannot be written.
    """
    artifacts = bundle / "artifacts"
    files: dict[str, Any] = {}
    with storage_errors("write the manifest", artifacts):
        for relative, status in walk(artifacts):
            if relative == MANIFEST or stat.S_ISDIR(status.st_mode):
                continue
            if not stat.S_ISREG(status.st_mode):
                raise WorkFailedError(
                    "an artifact must be a plain file, not a link or a device",
                    where=str(artifacts / relative),
                    remedy="make the task write a plain file",
                )
            entry = make_entry(artifacts / relative, relative, status)
            files[relative] = {"size": entry.size, "sha256": entry.sha256}
        data = manifest_bytes(files)
        write_atomic(artifacts / MANIFEST, data)
    return sha256_bytes(data)


def output_bytes(bundle: Path) -> int:
    """Return the size of all artifacts in an attempt's manifest, in bytes; 0 without a manifest."""
    try:
        manifest = read_json(bundle / "artifacts" / MANIFEST)
        return sum(int(entry["size"]) for entry in manifest["files"].values())
    except (RequestError, KeyError, TypeError, ValueError, AttributeError):
        return 0


def manifest_bytes(files: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest over `files`: {path: {"size", "sha256"}}."""
    return canonical_json({"schema_version": SCHEMA_VERSION, "files": files}) + b"\n"
