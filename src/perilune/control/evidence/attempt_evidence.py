"""The files of an attempt: whether its artifacts are complete, and the worker's last output."""

from collections.abc import Collection
from pathlib import Path

from perilune.bundle.remote.runner import stays_on_machine
from perilune.bundle.storage import storage_errors
from perilune.bundle.verify import manifest_hashes
from perilune.execution.log import last_lines
from perilune.execution.placements.mirror import Bring
from perilune.execution.verdict import Verdict
from perilune.files import read_json, sha256_file


def find_evidence_problem(attempt: Path, verdict: Verdict, removed: Collection[str] = ()) -> str:
    """Return the first problem of an attempt's artifacts, or "".

    The manifest must have the verdict's digest, and its files their sizes, except for `removed` files.
    (`verify` compares contents.)
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


def unfetched_files(attempt: Path, bring: Bring) -> dict[str, str]:
    """Return the SHA-256 of the artifacts that stayed on the attempt's machine, by path in the bundle."""
    return {
        path: sha256
        for path, sha256 in manifest_hashes(attempt).items()
        if stays_on_machine(path, bring) and not (attempt / path).exists()
    }


def worker_output(attempt: Path, lines: int = 3) -> str:
    """Return the last lines that the worker itself printed; "" if there are none."""
    try:
        return last_lines((attempt / "runtime" / "worker.log").read_bytes(), lines)
    except OSError:
        return ""
