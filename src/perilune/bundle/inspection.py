"""Summarizes a bundle."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from perilune.bundle.digest import frozen_entries, recorded_digest, source_files
from perilune.bundle.job import Job
from perilune.bundle.manifest import MANIFEST
from perilune.errors import RequestError
from perilune.files import read_json
from perilune.frozen import invalid_value


def inspect(bundle: Path) -> dict[str, Any]:
    """Summarize the documents of a bundle, without verifying them.

    Keys: path, digest, task, stage, seed, entrypoint, resources, secrets (names), inputs [{name, kind, path,
    digest, files, bytes}], frozen {files, bytes}, artifacts {files, bytes, manifest}, and result: the
    contents of runtime/result.json, or None.

    Raises:
        RequestError: when `bundle` is not a bundle, or its documents are damaged.
    """
    job = read_job(bundle)
    inputs = [{**reference.model_dump(), **_count_files(bundle / reference.path)} for reference in job.inputs]
    entries = frozen_entries(bundle)
    result = bundle / "runtime" / "result.json"
    return {
        "path": str(bundle),
        "digest": recorded_digest(bundle),
        "task": job.task,
        "stage": job.stage,
        "seed": job.seed,
        "entrypoint": list(job.entrypoint),
        "resources": job.resources.model_dump(),
        "secrets": list(job.secrets),
        "inputs": inputs,
        "frozen": {"files": len(entries), "bytes": sum(entry.size for entry in entries)},
        "artifacts": {
            **_count_files(bundle / "artifacts"),
            "manifest": (bundle / "artifacts" / MANIFEST).is_file(),
        },
        "result": read_object(result) if result.is_file() else None,
    }


def read_job(bundle: Path) -> Job:
    """Return the job of a bundle.

    Raises:
        RequestError: when job.json is missing, malformed or has another schema; names the key.
    """
    path = bundle / "job.json"
    document = read_json(path)
    try:
        return Job.model_validate(document)
    except ValidationError as error:
        remedy = "freeze the bundle with this version of perilune"
        raise invalid_value(error, where=str(path), remedy=remedy) from None


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises RequestError for a missing or damaged file, or another JSON value."""
    document = read_json(path)
    if not isinstance(document, dict):
        raise RequestError("not a JSON object", where=str(path), remedy="fetch the bundle again")
    return document


def _count_files(path: Path) -> dict[str, int]:
    """Return the number of files at or below `path` and their bytes."""
    if not path.exists():
        return {"files": 0, "bytes": 0}
    files = source_files(path)
    return {"files": len(files), "bytes": sum(file.stat().st_size for _, file in files)}
