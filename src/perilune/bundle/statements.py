"""The statements that a home signs about a run: its bundle, its result, and deleted artifacts.

The predicate of a result is SLSA provenance (https://slsa.dev/spec/v1.0/provenance): parameters, input files,
builder and times. Its subjects are all artifacts and all files in runtime/, with SHA-256 and mode.
"""

import os
import stat
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import perilune
from perilune.bundle.digest import BUNDLE_FILE, recorded_digest, walk
from perilune.bundle.envelope import STATEMENT_TYPE
from perilune.bundle.manifest import MANIFEST
from perilune.files import read_json, sha256_file

BUNDLE_PREDICATE = "urn:perilune:bundle:v1"
RESULT_PREDICATE = "https://slsa.dev/provenance/v1"
REMOVAL_PREDICATE = "urn:perilune:removal:v1"
BUILD_TYPE = "urn:perilune:run:v1"
# Files of an attempt that may still change.
UNATTESTED = frozenset({"runtime/worker.log", "runtime/worker.lock", "runtime/removed.json"})
PARAMETERS = ("task", "stage", "spec", "model", "environment", "seed", "resources")


def bundle_statement(bundle: Path, run: str, submitted: float) -> dict[str, Any]:
    """State that `run` was submitted with the frozen bundle at `bundle`, at `submitted` (Unix seconds)."""
    return {
        "_type": STATEMENT_TYPE,
        "subject": [_subject(BUNDLE_FILE, sha256_file(bundle / BUNDLE_FILE))],
        "predicateType": BUNDLE_PREDICATE,
        "predicate": {
            "bundleDigest": recorded_digest(bundle),
            "run": run,
            "submittedOn": format_timestamp(submitted),
        },
    }


def result_statement(attempt: Path, run: str, number: int, started: float, finished: float) -> dict[str, Any]:
    """State that attempt `number` of `run` produced the files in `attempt`.

    Args:
        attempt: the folder of the attempt, with its artifacts and their manifest.
        started, finished: Unix seconds.
    """
    job = read_json(attempt / "job.json")
    frozen = read_json(attempt / BUNDLE_FILE)["files"]
    files = read_json(attempt / "artifacts" / MANIFEST)["files"]
    artifacts = {f"artifacts/{path}": file["sha256"] for path, file in files.items()}
    artifacts[f"artifacts/{MANIFEST}"] = sha256_file(attempt / "artifacts" / MANIFEST)
    return {
        "_type": STATEMENT_TYPE,
        "subject": [
            _subject(name, sha256, _present_mode(attempt / name))
            for name, sha256 in sorted((artifacts | _runtime_hashes(attempt)).items())
        ],
        "predicateType": RESULT_PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {name: job[name] for name in PARAMETERS},
                "internalParameters": {"bundleDigest": recorded_digest(attempt)},
                "resolvedDependencies": [_subject(file["path"], file["sha256"]) for file in frozen],
            },
            "runDetails": {
                "builder": {"id": "urn:perilune:controller", "version": {"perilune": perilune.__version__}},
                "metadata": {
                    "invocationId": f"{run}/{number}",
                    "startedOn": format_timestamp(started),
                    "finishedOn": format_timestamp(finished),
                },
            },
        },
    }


def removal_statement(files: Mapping[str, str], run: str, number: int, removed: float) -> dict[str, Any]:
    """State that artifacts of attempt `number` of `run` are missing on purpose.

    They were deleted after the result, or stayed on the attempt's machine.

    Args:
        files: path in the bundle to SHA-256.
        removed: Unix seconds.
    """
    return {
        "_type": STATEMENT_TYPE,
        "subject": [_subject(name, sha256) for name, sha256 in sorted(files.items())],
        "predicateType": REMOVAL_PREDICATE,
        "predicate": {"invocationId": f"{run}/{number}", "removedOn": format_timestamp(removed)},
    }


def format_timestamp(seconds: float) -> str:
    """Return Unix seconds as RFC 3339 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def format_mode(status: os.stat_result) -> str:
    """Return permission bits, as four octal digits."""
    return f"{stat.S_IMODE(status.st_mode):04o}"


def _present_mode(path: Path) -> str:
    """Return the mode of an artifact; "" if it stayed on the attempt's machine."""
    return format_mode(path.lstat()) if path.exists() else ""


def _runtime_hashes(attempt: Path) -> dict[str, str]:
    """Return SHA-256 of the files in runtime/, by path in the bundle."""
    return {
        f"runtime/{path}": sha256_file(attempt / "runtime" / path)
        for path, status in walk(attempt / "runtime")
        if stat.S_ISREG(status.st_mode) and f"runtime/{path}" not in UNATTESTED
    }


def _subject(name: str, sha256: str, mode: str = "") -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": sha256}} | ({"annotations": {"mode": mode}} if mode else {})
