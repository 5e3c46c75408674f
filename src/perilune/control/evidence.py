"""What an attempt left: is it whole, and what did it say last."""

from __future__ import annotations

from pathlib import Path

from perilune.bundle.storage import storage_errors
from perilune.execution.verdict import Verdict
from perilune.files import read_json, sha256_file

LOG_TAIL = 20  # lines


def evidence_problem(attempt: Path, verdict: Verdict) -> str:
    """What is wrong with an attempt's artifacts: "" when the manifest is the one of the verdict and all of
    its files are there in their sizes. (`verify` compares contents.)
    """
    manifest = attempt / "artifacts" / "manifest.json"
    with storage_errors("read the evidence", manifest):
        if not manifest.is_file() or sha256_file(manifest) != verdict.manifest_digest:
            return "artifacts/manifest.json is not the one the worker wrote"
        for name, entry in read_json(manifest)["files"].items():
            path = manifest.parent / name
            if not path.is_file() or path.stat().st_size != entry["size"]:
                return f"artifacts/{name} is missing or has another size"
    return ""


def log_tail(path: Path, lines: int = LOG_TAIL) -> str:
    """The last lines of a log, or nothing when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - (1 << 16)))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
