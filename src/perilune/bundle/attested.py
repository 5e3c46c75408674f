"""Checks the evidence of a run against its signed statements, with files only: no database, no network.

Evidence is a folder:

```
bundle/         the frozen bundle with the artifacts and runtime files of one attempt. The optional file
                runtime/removed.json is a signed list of the artifacts that were deleted on purpose
attestations/   bundle.json and result.json: signed statements about the bundle and the result
controller.pub  the public key of the signatures
```
"""

from __future__ import annotations

import base64
import json
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from perilune.bundle.digest import OBSERVED, walk
from perilune.bundle.envelope import SignatureError, verify_statement
from perilune.bundle.statements import (
    BUNDLE_PREDICATE,
    REMOVAL_PREDICATE,
    RESULT_PREDICATE,
    UNATTESTED,
    format_mode,
)
from perilune.bundle.verify import manifest_hashes, verify
from perilune.errors import RequestError
from perilune.files import read_regular, sha256_file

REMOVED = "runtime/removed.json"  # in the folder of an attempt
BUNDLE_STATEMENT, RESULT_STATEMENT = "bundle.json", "result.json"


@dataclass(frozen=True, slots=True)
class Evidence:
    """The files of one attempt's evidence.

    Attributes:
        submitted, result: envelopes of the two statements.
        run: the run that the statements must be about; None accepts any run.
    """

    bundle: Path
    submitted: Path
    result: Path
    key: Path
    run: str | None = None

    @classmethod
    def from_export(cls, folder: Path, key: Path) -> Evidence:
        """Return the evidence in a folder that `perilune export` made."""
        statements = folder / "attestations"
        return cls(folder / "bundle", statements / BUNDLE_STATEMENT, statements / RESULT_STATEMENT, key)


class Subject(NamedTuple):
    """A file of a result: its path in the bundle, its SHA-256, and its mode if that is stated."""

    name: str
    sha256: str
    mode: str | None


def attestation_problems(evidence: Evidence) -> Iterator[str]:
    """Yield one sentence for each difference from the signed statements.

    Raises:
        RequestError: when the key or the bundle cannot be read.
    """
    expected_digest, run = None, evidence.run
    try:
        expected_digest, submitted_run = _read_bundle_statement(evidence)
        run = run or submitted_run
        yield from _check_run(evidence.submitted, submitted_run, run)
    except SignatureError as error:
        yield f"{evidence.submitted.name} {error.what}"
    invocation, subjects = None, None
    try:
        invocation, subjects = read_result_statement(evidence)
        yield from _check_run(evidence.result, invocation.partition("/")[0], run)
    except SignatureError as error:
        yield f"{evidence.result.name} {error.what}"
    removed: frozenset[str] = frozenset()
    try:
        removed = read_removals(evidence.bundle, evidence.key, invocation)
    except SignatureError as error:
        yield f"{REMOVED} {error.what}"
    differences = verify(evidence.bundle, expected_digest, removed)
    yield from map(str, differences)
    if subjects is not None:
        known = {difference.path for difference in differences}
        yield from _result_differences(evidence.bundle, subjects, known)


def _result_differences(bundle: Path, subjects: Sequence[Subject], known: Collection[str]) -> Iterator[str]:
    """Yield differences of artifacts and runtime files from a signed result.

    Args:
        known: paths that differ from the manifest, so that the manifest's hashes are not those of the files.
    """
    hashes = manifest_hashes(bundle) | dict.fromkeys(known, "")
    present = {
        f"{folder}/{path}": status
        for folder in OBSERVED
        if (bundle / folder).is_dir()
        for path, status in walk(bundle / folder)
    }
    for name, sha256, mode in subjects:
        status = present.get(name)
        plain = status is not None and stat.S_ISREG(status.st_mode)
        actual = hashes.get(name) or (sha256_file(bundle / name) if plain and name not in hashes else "")
        if actual != sha256:
            yield f"{name} is not what was attested"
        elif status is not None and mode not in (None, now := format_mode(status)):
            yield f"{name} has another mode: {now}"
    attested = {subject.name for subject in subjects} | UNATTESTED
    if "runtime/claim.json" in attested:  # not in results of older versions, which attest a part of runtime/
        for name in sorted(name for name in present.keys() - attested if name.startswith("runtime/")):
            yield f"{name} was not there when the result was attested"


def _read_bundle_statement(evidence: Evidence) -> tuple[str, str]:
    """Return the digest of the submitted bundle, and the run that it was submitted for."""
    with _require_fields(evidence.submitted):
        predicate = read_statement(evidence.submitted, evidence.key, BUNDLE_PREDICATE)["predicate"]
        return str(predicate["bundleDigest"]), str(predicate["run"])


def read_result_statement(evidence: Evidence) -> tuple[str, list[Subject]]:
    """Return the attempt of a result as RUN/NUMBER, and its files.

    Raises:
        SignatureError: when the statement is damaged, or not signed with the key.
    """
    with _require_fields(evidence.result):
        statement = read_statement(evidence.result, evidence.key, RESULT_PREDICATE)
        subjects = [
            Subject(str(row["name"]), str(row["digest"]["sha256"]), row.get("annotations", {}).get("mode"))
            for row in statement["subject"]
        ]
        return str(statement["predicate"]["runDetails"]["metadata"]["invocationId"]), subjects


@contextmanager
def _require_fields(envelope: Path) -> Iterator[None]:
    """Refuse a signed statement without the fields that the block reads."""
    try:
        yield
    except (KeyError, TypeError, AttributeError):
        raise SignatureError("lacks fields of such a statement", where=str(envelope)) from None


def read_unverified_removals(bundle: Path) -> frozenset[str]:
    """Read the removed artifacts without checking the signature; empty when the file is unreadable."""
    try:
        payload = json.loads(read_regular(bundle / REMOVED))["payload"]
        subjects = json.loads(base64.b64decode(payload, validate=True))["subject"]
        return frozenset(str(subject["name"]) for subject in subjects)
    except (OSError, RequestError, ValueError, TypeError, KeyError, RecursionError):
        return frozenset()


def read_removals(bundle: Path, key: Path, invocation: str | None = None) -> frozenset[str]:
    """Return the artifacts of an attempt that were deleted on purpose, as paths in the bundle.

    Args:
        invocation: the attempt that the statement must be about, as RUN/NUMBER; None accepts any.

    Raises:
        SignatureError: when the list is not signed with `key`, or is about another attempt.
    """
    path = bundle / REMOVED
    if not path.exists():
        return frozenset()
    with _require_fields(path):
        statement = read_statement(path, key, REMOVAL_PREDICATE)
        attempt = str(statement["predicate"]["invocationId"])
        names = frozenset(str(subject["name"]) for subject in statement["subject"])
    if invocation not in {None, attempt}:
        raise SignatureError(f"is about another attempt ({attempt})", where=str(path))
    return names


def _check_run(envelope: Path, about: str, run: str | None) -> Iterator[str]:
    if run not in {None, about}:
        yield f"{envelope.name} is about another run ({about})"


def read_statement(envelope: Path, key: Path, predicate: str) -> dict[str, Any]:
    """Return the statement in an envelope.

    Raises:
        SignatureError: when it is not signed with `key`, or states something else.
    """
    statement = verify_statement(envelope, key)
    if statement.get("predicateType") != predicate:
        raise SignatureError(
            f"attests something else ({statement.get('predicateType')})", where=str(envelope)
        )
    return statement
