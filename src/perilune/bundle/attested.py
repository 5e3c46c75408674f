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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.bundle.digest import OBSERVED, walk
from perilune.bundle.envelope import SignatureError, verified_statement
from perilune.bundle.statements import (
    BUNDLE_PREDICATE,
    REMOVAL_PREDICATE,
    RESULT_PREDICATE,
    UNATTESTED,
    mode_of,
)
from perilune.bundle.verify import attested_hashes, verify
from perilune.files import sha256_file

REMOVED = "runtime/removed.json"  # in the folder of an attempt
BUNDLE_STATEMENT, RESULT_STATEMENT = "bundle.json", "result.json"


@dataclass(frozen=True, slots=True)
class Evidence:
    """The files of one attempt's evidence.

    Attributes:
        bundle: the attempt's copy of the bundle.
        submitted, result: envelopes of the two statements.
        key: the public key.
        run: the run that the statements must be about; None accepts any run.
    """

    bundle: Path
    submitted: Path
    result: Path
    key: Path
    run: str | None = None

    @classmethod
    def exported(cls, folder: Path, key: Path) -> Evidence:
        """The evidence in a folder that `perilune export` made."""
        statements = folder / "attestations"
        return cls(folder / "bundle", statements / BUNDLE_STATEMENT, statements / RESULT_STATEMENT, key)


def attestation_problems(evidence: Evidence) -> Iterator[str]:
    """Yield one sentence for each difference from the signed statements.

    Raises:
        RequestError: when the key or the bundle cannot be read.
    """
    promised = None
    try:
        submitted = read_statement(evidence.submitted, evidence.key, BUNDLE_PREDICATE)
        promised = str(submitted["predicate"]["bundleDigest"])
        yield from _about(evidence, evidence.submitted, submitted["predicate"]["run"])
    except SignatureError as error:
        yield f"{evidence.submitted.name} {error.what}"
    removed: frozenset[str] = frozenset()
    try:
        removed = removed_files(evidence.bundle, evidence.key, evidence.run)
    except SignatureError as error:
        yield f"{REMOVED} {error.what}"
    differences = verify(evidence.bundle, promised, removed)
    yield from map(str, differences)
    try:
        result = read_statement(evidence.result, evidence.key, RESULT_PREDICATE)
    except SignatureError as error:
        yield f"{evidence.result.name} {error.what}"
        return
    invocation = str(result["predicate"]["runDetails"]["metadata"]["invocationId"])
    yield from _about(evidence, evidence.result, invocation.partition("/")[0])
    hashes = attested_hashes(evidence.bundle)
    for name in {difference.path for difference in differences}:
        hashes[name] = ""  # differs from the manifest
    present = {
        f"{folder}/{path}": status
        for folder in OBSERVED
        if (evidence.bundle / folder).is_dir()
        for path, status in walk(evidence.bundle / folder)
    }
    for subject in result["subject"]:
        name, status = subject["name"], present.get(subject["name"])
        plain = status is not None and stat.S_ISREG(status.st_mode)
        found = hashes.get(name) or (
            sha256_file(evidence.bundle / name) if plain and name not in hashes else ""
        )
        if found != subject["digest"]["sha256"]:
            yield f"{name} is not what was attested"
        elif status is not None and (mode := mode_of(status)) != subject.get("annotations", {}).get(
            "mode", mode
        ):
            yield f"{name} has another mode: {mode}"
    attested = {subject["name"] for subject in result["subject"]} | UNATTESTED
    if "runtime/claim.json" in attested:  # older results attested only a part of runtime/
        for name in sorted(name for name in present.keys() - attested if name.startswith("runtime/")):
            yield f"{name} was not there when the result was attested"


def stated_removals(bundle: Path) -> frozenset[str]:
    """Like `removed_files`, without checking the signature; empty when the file is unreadable."""
    try:
        payload = json.loads((bundle / REMOVED).read_bytes())["payload"]
        subjects = json.loads(base64.b64decode(payload, validate=True))["subject"]
        return frozenset(str(subject["name"]) for subject in subjects)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return frozenset()


def removed_files(bundle: Path, key: Path, run: str | None = None) -> frozenset[str]:
    """The artifacts of an attempt that were deleted on purpose, as paths in the bundle.

    Args:
        run: the run that the statement must be about; None accepts any run.

    Raises:
        SignatureError: when the list is not signed with `key`, or is about another run.
    """
    path = bundle / REMOVED
    if not path.exists():
        return frozenset()
    statement = read_statement(path, key, REMOVAL_PREDICATE)
    whose = str(statement["predicate"]["invocationId"]).partition("/")[0]
    if run not in {None, whose}:
        raise SignatureError(f"is about another run ({whose})", where=str(path))
    return frozenset(str(subject["name"]) for subject in statement["subject"])


def _about(evidence: Evidence, envelope: Path, run: str) -> Iterator[str]:
    if evidence.run is not None and run != evidence.run:
        yield f"{envelope.name} is about another run ({run})"


def read_statement(envelope: Path, key: Path, predicate: str) -> dict[str, Any]:
    """The statement in an envelope.

    Args:
        predicate: the type of statement that it must be.

    Raises:
        SignatureError: when it is not signed with `key`, or states something else.
    """
    statement = verified_statement(envelope, key)
    if statement.get("predicateType") != predicate:
        raise SignatureError(
            f"attests something else ({statement.get('predicateType')})", where=str(envelope)
        )
    return statement
