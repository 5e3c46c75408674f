"""What an attempt left: is it whole, and what did it say last."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from perilune.bundle.storage import storage_errors
from perilune.execution.log import last_lines
from perilune.execution.verdict import Verdict
from perilune.files import read_json, sha256_file


def evidence_problem(attempt: Path, verdict: Verdict, removed: Collection[str] = ()) -> str:
    """What is wrong with an attempt's artifacts: "" when the manifest is the one of the verdict and all of
    its files are there in their sizes, but for `removed` ones. (`verify` compares contents.)
    """
    manifest = attempt / "artifacts" / "manifest.json"
    with storage_errors("read the evidence", manifest):
        if not manifest.is_file() or sha256_file(manifest) != verdict.manifest_digest:
            return "artifacts/manifest.json is not the one the worker wrote"
        for name, entry in read_json(manifest)["files"].items():
            path = manifest.parent / name
            if f"artifacts/{name}" in removed and not path.exists():
                continue
            if not path.is_file() or path.stat().st_size != entry["size"]:
                return f"artifacts/{name} is missing or has another size"
    return ""


def worker_output(attempt: Path, lines: int = 3) -> str:
    """The last lines of what the worker itself said; "" when it said nothing."""
    try:
        return last_lines((attempt / "runtime" / "worker.log").read_bytes(), lines)
    except OSError:
        return ""
