"""Sign submitted bundles and accepted results, before the database records them.

Every recorded run therefore has its statement, even if a command was killed. A statement that was signed but
not recorded is overwritten when a later command records it.
"""

import time
from collections.abc import Mapping
from pathlib import Path

from perilune.bundle.attested import BUNDLE_STATEMENT, REMOVED, RESULT_STATEMENT, Evidence, read_removals
from perilune.bundle.envelope import PUBLIC, SigningKey
from perilune.bundle.statements import bundle_statement, removal_statement, result_statement
from perilune.bundle.storage import make_read_only, storage_errors
from perilune.bundle.verify import manifest_hashes
from perilune.control.record.home import Home
from perilune.control.record.store import Attempt
from perilune.errors import PeriluneError
from perilune.files import write_atomic

ATTESTATIONS_FOLDER = "attestations"  # of a run


def attest_bundle(home: Home, directory: Path, run_id: str) -> None:
    """Sign that `run_id` was submitted with the bundle in `directory`, which becomes the run's directory."""
    _write_signed(
        directory / ATTESTATIONS_FOLDER / BUNDLE_STATEMENT,
        home,
        bundle_statement(directory / "bundle", run_id, time.time()),
    )


def attest_result(home: Home, attempt: Attempt, directory: Path) -> None:
    """Sign the results of an attempt in `directory`, whose manifest has been checked.

    Makes checkpoints read-only first, so that the bundles of later stages can share their files.
    """
    make_read_only(directory / "artifacts" / "checkpoints")
    statement = result_statement(directory, attempt.run_id, attempt.number, attempt.created, time.time())
    _write_signed(_result_path(home, attempt.run_id, attempt.number), home, statement)


def evidence_paths(home: Home, run_id: str, number: int) -> Evidence:
    return Evidence(
        home.attempt(run_id, number),
        home.run(run_id) / ATTESTATIONS_FOLDER / BUNDLE_STATEMENT,
        _result_path(home, run_id, number),
        home.keys / PUBLIC,
        run_id,
    )


def attest_removal(home: Home, run_id: str, number: int, files: Mapping[str, str]) -> None:
    """Sign that some artifacts of an attempt were removed deliberately.

    Args:
        files: path in the bundle to SHA-256. Files that were removed before stay in the statement.
    """
    attempt = home.attempt(run_id, number)
    known = {**manifest_hashes(attempt), **files}
    removed = {name: known[name] for name in removed_artifacts(home, run_id, number) | files.keys()}
    _write_signed(attempt / REMOVED, home, removal_statement(removed, run_id, number, time.time()))


def removed_artifacts(home: Home, run_id: str, number: int) -> frozenset[str]:
    """Return the artifacts of an attempt that this home has signed as removed deliberately."""
    try:
        return read_removals(home.attempt(run_id, number), home.keys / PUBLIC, f"{run_id}/{number}")
    except PeriluneError:
        return frozenset()


def _result_path(home: Home, run_id: str, number: int) -> Path:
    return home.run(run_id) / ATTESTATIONS_FOLDER / str(number) / RESULT_STATEMENT


def _write_signed(path: Path, home: Home, statement: dict[str, object]) -> None:
    envelope = SigningKey(home.keys).sign(statement)
    with storage_errors("keep a signed statement", path):
        write_atomic(path, envelope)
