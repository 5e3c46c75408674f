"""Describes an exported run as an RO-Crate 1.1 with the profile Process Run Crate 0.5."""

import json
import mimetypes
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from perilune.bundle.attested import Evidence
from perilune.bundle.digest import walk
from perilune.bundle.envelope import PUBLIC, verify_statement
from perilune.errors import requires_extra
from perilune.files import read_json, sha256_file, write_atomic

METADATA = "ro-crate-metadata.json"
PROFILE = "https://w3id.org/ro/wfrun/process/0.5"


def describe(folder: Path) -> None:
    """Write ro-crate-metadata.json into an exported run.

    The action has the frozen files as its objects, the artifacts as its results, and perilune as its
    instrument.

    Raises:
        RequestError: when the package `rocrate` is missing.
    """
    with requires_extra("archive", "--ro-crate needs the package rocrate"):
        from rocrate.model.contextentity import ContextEntity
        from rocrate.rocrate import ROCrate
    evidence = Evidence.from_export(folder, folder / PUBLIC)
    details = verify_statement(evidence.result, evidence.key)["predicate"]["runDetails"]
    metadata, version = details["metadata"], details["builder"]["version"]["perilune"]
    job = read_json(folder / "bundle" / "job.json")
    title = f"{job['stage']}: {job['task']}, seed {job['seed']}"

    crate: Any = ROCrate(version="1.1")
    crate.name = f"Run {metadata['invocationId']}"
    crate.description = f"{title}. Check it with `perilune verify`."
    crate.datePublished = datetime.fromisoformat(metadata["finishedOn"])
    crate.license = "No license is stated; ask the provider of this crate."
    crate.root_dataset["conformsTo"] = crate.add(
        ContextEntity(
            crate, PROFILE, {"@type": "CreativeWork", "name": "Process Run Crate", "version": "0.5"}
        )
    )
    files = {
        name: crate.add_file(folder / name, quote(name), properties=_facts(folder / name))
        for name, _ in walk(folder)
        if name != METADATA and not (folder / name).is_dir()
    }
    program = {"@type": "SoftwareApplication", "name": "perilune", "softwareVersion": version}
    action = {
        "@type": "CreateAction",
        "name": title,
        "startTime": metadata["startedOn"],
        "endTime": metadata["finishedOn"],
        "actionStatus": {"@id": "http://schema.org/CompletedActionStatus"},
    }
    run = crate.add(ContextEntity(crate, f"#{metadata['invocationId']}", action))
    run["instrument"] = crate.add(ContextEntity(crate, f"#perilune-{version}", program))
    run["object"] = [file for name, file in files.items() if _part(name) in {"job.json", "inputs", "scripts"}]
    run["result"] = [file for name, file in files.items() if _part(name) == "artifacts"]
    crate.root_dataset["mentions"] = run
    document = json.dumps(crate.metadata.generate(), indent=2, ensure_ascii=False, sort_keys=True)
    write_atomic(folder / METADATA, document + "\n")


def _part(name: str) -> str:
    """Return the part of the bundle that an exported file belongs to."""
    top, _, rest = name.partition("/")
    return rest.partition("/")[0] if top == "bundle" else ""


def _facts(path: Path) -> dict[str, str]:
    kind = "application/json" if path.suffix == ".jsonl" else mimetypes.guess_type(path.name)[0]
    return {
        "name": path.name,
        "contentSize": str(path.stat().st_size),
        "sha256": sha256_file(path),
        "encodingFormat": kind or "application/octet-stream",
    }
