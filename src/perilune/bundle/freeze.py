"""Freezes a job and its inputs into a bundle, a directory that never changes."""

from collections.abc import Mapping, Sequence
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
from perilune.bundle.job import InputReference, Job
from perilune.bundle.remote.runner import OPTIMIZER
from perilune.bundle.scripts import write_scripts
from perilune.bundle.secret_sources import register_secrets
from perilune.bundle.shared_files import SharedFiles
from perilune.bundle.storage import READ_ONLY, build_directory, copy_file, publish, storage_errors
from perilune.bundle.verify import require_verified, verify
from perilune.errors import RequestError
from perilune.files import canonical_json, sha256_file
from perilune.redaction import KNOWN_SECRETS


def freeze(job: Job, inputs: Mapping[str, Path], destination: Path, shared: SharedFiles | None = None) -> str:
    """Build the bundle of `job` at `destination` and return its digest.

    Builds the bundle next to `destination` and renames it. The same job, inputs, code and installed packages
    give the same digest on every machine and at any time.

    Args:
        job: the job. The digest of each reference in `job.inputs` is checked, or filled in if it is empty.
        inputs: the file or folder of each reference in `job.inputs`, by name.
        destination: a path that does not exist, or an identical bundle.
        shared: the files of a home that the bundle may hard-link to; None copies everything.

    Raises:
        RequestError: when an input is missing or changed, a file contains the value of a secret, the disk
            cannot be written, or another bundle is at `destination`. Leaves no files behind.
    """
    references = {reference.name: reference for reference in job.inputs}
    if references.keys() != inputs.keys():
        odd = ", ".join(sorted(references.keys() ^ inputs.keys()))
        raise RequestError(f"the job and the given inputs differ in: {odd}", where=f"stage {job.stage}")
    with storage_errors("freeze the bundle", destination), build_directory(destination) as building:
        for directory in ("inputs", "scripts", *OBSERVED):
            (building / directory).mkdir()
        digests = {}
        for name, source in sorted(inputs.items()):
            files = _input_files(job, references[name], source)
            digests[name] = _add_input(files, building / references[name].path, shared)
            _check_input_digest(references[name], digests[name], source)
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
            _require_identical(destination, digest)
    return digest


def copy_for_attempt(bundle: Path, destination: Path) -> None:
    """Copy a frozen bundle to `destination` for an attempt, with empty folders runtime/ and artifacts/.

    Raises:
        RequestError: when the bundle was changed, `destination` exists, or the disk cannot be written. Leaves
            no files behind.
    """
    digest = recorded_digest(bundle)
    if not all((bundle / name).exists() for name in FROZEN):
        require_verified(bundle, digest)  # raises an error that names the missing file
    with storage_errors("copy the bundle", destination), build_directory(destination) as building:
        for directory in ("inputs", "scripts", *OBSERVED):
            (building / directory).mkdir()
        for name in (*FROZEN, BUNDLE_FILE):
            for relative, source in source_files(bundle / name):
                target = building / name if relative == "." else building / name / relative
                copy_file(source, target, source.stat().st_mode & 0o777, link=True)
        require_verified(building, digest)
        publish(building, destination)


def job_document(job: Job) -> bytes:
    """Return the bytes of job.json."""
    try:
        return canonical_json(job.model_dump(mode="json")) + b"\n"
    except ValueError as error:
        raise RequestError(
            f"the job cannot be written as JSON: {error}", where=f"stage {job.stage}"
        ) from None


def _input_files(job: Job, reference: InputReference, source: Path) -> list[tuple[str, Path]]:
    """Return the files of an input, without the optimizer's state unless the stage restores it."""
    files = source_files(source)
    if reference.kind == "checkpoint" and not (reference.digest or job.spec.get("restore_optimizer")):
        files = [file for file in files if not file[0].startswith(f"{OPTIMIZER}/")]
    if not files:
        raise RequestError("the input is an empty folder", where=str(source), remedy="check the path")
    return files


def _add_input(files: Sequence[tuple[str, Path]], target: Path, shared: SharedFiles | None) -> str:
    """Copy or link the files of one input into the bundle; return their digest."""
    contents = []
    for relative, path in files:
        copy = target if relative == "." else target / relative
        if shared is None:
            copy_file(path, copy, READ_ONLY)
        else:
            shared.add_input(path, copy)
        contents.append((relative, sha256_file(copy)))
    return contents_digest(contents)


def _check_input_digest(reference: InputReference, digest: str, source: Path) -> None:
    if reference.digest and digest != reference.digest:
        raise RequestError(
            f"the input is not the one the job names: its digest is {digest}, not {reference.digest}",
            where=str(source),
            remedy="it changed after the job was made; submit the stage again",
        )


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(READ_ONLY)


def _require_identical(destination: Path, digest: str) -> None:
    """Accept an identical bundle at `destination`; refuse anything else."""
    if not destination.is_dir() or verify(destination, digest):
        raise RequestError(
            "another file or bundle is already here", where=str(destination), remedy="choose another folder"
        )


def _refuse_secrets(job: Job, building: Path) -> None:
    """Refuse to freeze a file that contains the value of one of the job's secrets."""
    register_secrets(job.secrets)
    for relative, path in source_files(building):
        with path.open("rb") as file:
            secret = KNOWN_SECRETS.find_secret(file)
        if secret is not None:
            raise RequestError(
                f"{relative} contains the value of the secret {secret}",
                where=f"stage {job.stage}",
                remedy=f"write its name, {secret}, instead; then renew the secret, because it has leaked",
            )
