"""Is evidence what was attested of it? Works on files alone: no database, no network.

Evidence is a folder:

```
bundle/         the frozen bundle with what one attempt observed in it
attestations/   bundle.json and result.json: signed statements about it
controller.pub  the key they are signed with
```
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.bundle.envelope import SignatureError, opened
from perilune.bundle.statements import BUNDLE_PREDICATE, RESULT_PREDICATE
from perilune.bundle.verify import verify
from perilune.files import sha256_file

BUNDLE_STATEMENT, RESULT_STATEMENT = "bundle.json", "result.json"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Where the parts of one attempt's evidence lie.

    Attributes:
        bundle: the attempt's copy of the bundle.
        submitted, result: envelopes of the two statements.
        key: the public key.
        run: what the statements must be about; None takes any run.
    """

    bundle: Path
    submitted: Path
    result: Path
    key: Path
    run: str | None = None

    @classmethod
    def exported(cls, folder: Path, key: Path) -> Evidence:
        """As `perilune export` lays it out."""
        statements = folder / "attestations"
        return cls(folder / "bundle", statements / BUNDLE_STATEMENT, statements / RESULT_STATEMENT, key)


def tampered(evidence: Evidence) -> Iterator[str]:
    """What is not as attested, a sentence each; nothing when all is.

    Raises:
        RequestError: when the key or the bundle cannot be read.
    """
    promised = None
    try:
        submitted = _statement(evidence.submitted, evidence.key, BUNDLE_PREDICATE)
        promised = str(submitted["predicate"]["bundleDigest"])
        yield from _about(evidence, evidence.submitted, submitted["predicate"]["run"])
    except SignatureError as error:
        yield f"{evidence.submitted.name} {error.what}"
    yield from map(str, verify(evidence.bundle, promised))
    try:
        result = _statement(evidence.result, evidence.key, RESULT_PREDICATE)
    except SignatureError as error:
        yield f"{evidence.result.name} {error.what}"
        return
    invocation = str(result["predicate"]["runDetails"]["metadata"]["invocationId"])
    yield from _about(evidence, evidence.result, invocation.partition("/")[0])
    for subject in result["subject"]:
        path = evidence.bundle / subject["name"]
        if not path.is_file() or sha256_file(path) != subject["digest"]["sha256"]:
            yield f"{subject['name']} is not what was attested"


def _about(evidence: Evidence, envelope: Path, run: str) -> Iterator[str]:
    if evidence.run is not None and run != evidence.run:
        yield f"{envelope.name} is about another run ({run})"


def _statement(envelope: Path, key: Path, predicate: str) -> dict[str, Any]:
    statement = opened(envelope, key)
    if statement.get("predicateType") != predicate:
        raise SignatureError(
            f"attests something else ({statement.get('predicateType')})", where=str(envelope)
        )
    return statement
