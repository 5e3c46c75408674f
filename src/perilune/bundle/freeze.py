"""From a job and its inputs to a bundle: a directory that says all of what is to be run and never changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from perilune.bundle.digest import (
    BUNDLE_FILE,
    FROZEN,
    OBSERVED,
    bundle_document,
    contents_digest,
    entries_digest,
    frozen_entries,
    recorded_digest,
    source_files,
)
from perilune.bundle.job import Job
from perilune.bundle.scripts import write_scripts
from perilune.bundle.secret_sources import learn_secrets
from perilune.bundle.shared_files import SharedFiles
from perilune.bundle.storage import READ_ONLY, built_beside, place, publish, storage_errors
from perilune.bundle.verify import require_verified, verify
from perilune.errors import RequestError
from perilune.files import canonical_json, sha256_file
from perilune.redaction import KNOWN


def freeze(job: Job, inputs: Mapping[str, Path], destination: Path, shared: SharedFiles | None = None) -> str:
    """Build the bundle of `job` at `destination` and return its digest.

    Everything is built beside `destination` and renamed into place. The same job, inputs, code and
    installed packages give the same digest on any machine and at any time.

    Args:
        job: what to run. Every reference in `job.inputs` must be given in `inputs`; its digest is checked,
            or filled in when empty.
        inputs: name of the input, and the file or folder to stage.
        destination: a path that does not exist, or already holds this very bundle.
        shared: the files of a home that the bundle may hold hard links to; None copies everything.

    Raises:
        RequestError: on a missing or changed input, a secret's value in the bundle, a full or
            unwritable disk, or another bundle at `destination`. Nothing is left behind.
    """
    references = {reference.name: reference for reference in job.inputs}
    if references.keys() != inputs.keys():
        odd = ", ".join(sorted(references.keys() ^ inputs.keys()))
        raise RequestError(f"the job and its inputs disagree about: {odd}", where=f"stage {job.stage}")
    with storage_errors("freeze the bundle", destination), built_beside(destination) as building:
        for directory in ("inputs", "scripts", *OBSERVED):
            (building / directory).mkdir()
        digests = {
            name: _stage(source, building / references[name].path, references[name].digest, shared)
            for name, source in sorted(inputs.items())
        }
        staged = tuple(ref.model_copy(update={"digest": digests[ref.name]}) for ref in job.inputs)
        _write(building / "job.json", job_document(job.model_copy(update={"inputs": staged})))
        write_scripts(job, building / "scripts")
        _refuse_secrets(job, building)
        entries = frozen_entries(building)
        digest = entries_digest(entries)
        _write(building / BUNDLE_FILE, bundle_document(entries))
        try:
            publish(building, destination)
        except FileExistsError:
            _require_same(destination, digest)
    return digest


def attempt_copy(bundle: Path, destination: Path) -> None:
    """Make an attempt's own copy of a frozen bundle at `destination`, with runtime/ and artifacts/ empty.

    Raises:
        RequestError: when the copy is not what was frozen, when something is already at `destination`, or
            when the disk is full or not writable. Nothing is left behind.
    """
    digest = recorded_digest(bundle)
    with storage_errors("copy the bundle", destination), built_beside(destination) as building:
        for directory in ("inputs", "scripts", *OBSERVED):
            (building / directory).mkdir()
        for name in (*FROZEN, BUNDLE_FILE):
            for relative, source in source_files(bundle / name):
                target = building / name if relative == "." else building / name / relative
                place(source, target, source.stat().st_mode & 0o777, link=True)
        require_verified(building, digest)
        publish(building, destination)


def job_document(job: Job) -> bytes:
    """The bytes of job.json."""
    try:
        return canonical_json(job.model_dump(mode="json")) + b"\n"
    except ValueError as error:
        raise RequestError(
            f"the job cannot be written as JSON: {error}", where=f"stage {job.stage}"
        ) from None


def _stage(source: Path, target: Path, promised: str, shared: SharedFiles | None) -> str:
    """Copy or link one input into the bundle; return the digest of what lies there."""
    contents = []
    for relative, path in source_files(source):
        copy = target if relative == "." else target / relative
        if shared is None:
            place(path, copy, READ_ONLY)
        else:
            shared.stage(path, copy)
        contents.append((relative, sha256_file(copy)))
    if not contents:
        raise RequestError("the input is an empty folder", where=str(source))
    digest = contents_digest(contents)
    if promised and digest != promised:
        raise RequestError(
            f"the input is not the one the job names: its digest is {digest}, not {promised}",
            where=str(source),
            remedy="it changed after the job was made; submit the stage again",
        )
    return digest


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(READ_ONLY)


def _require_same(destination: Path, digest: str) -> None:
    """Freezing twice is freezing once; freezing over something else is refused."""
    if not destination.is_dir() or verify(destination, digest):
        raise RequestError(
            "something else is already here", where=str(destination), remedy="choose another destination"
        )


def _refuse_secrets(job: Job, building: Path) -> None:
    """Search everything that is about to be frozen for the values of the secrets the job names."""
    learn_secrets(job.secrets)
    for relative, path in source_files(building):
        with path.open("rb") as file:
            found = KNOWN.find(file)
        if found is not None:
            raise RequestError(
                f"the value of the secret {found} stands in {relative}",
                where=f"stage {job.stage}",
                remedy=f"write its name, {found}, in place of its value; then replace it, for it has leaked",
            )
