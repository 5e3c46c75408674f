"""Verify the record, and the evidence of succeeded runs."""

from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from perilune.bundle.attested import BUNDLE_STATEMENT, RESULT_STATEMENT, attestation_problems
from perilune.bundle.crate import describe
from perilune.bundle.digest import recorded_digest
from perilune.bundle.envelope import PUBLIC
from perilune.bundle.storage import copy_file
from perilune.bundle.verify import verify
from perilune.control.evidence.attestation import evidence_paths
from perilune.control.record.database import REPAIR_REMEDY, DamagedError
from perilune.control.record.home import Home
from perilune.control.record.store import Event, Run, Store, verify_events
from perilune.control.record.transitions import RunState
from perilune.control.runs.experiments import Control
from perilune.errors import RequestError
from perilune.files import read_json, write_json

VERIFIED_FILE = "verified.json"  # in the home: the last event that was verified


def find_damage(store: Store) -> str:
    """Describe corruption of the database, with a remedy; "" if there is none."""
    try:
        with store.snapshot() as session:
            damage = store.database.find_damage(session.connection())
    except DamagedError as error:
        return str(error)
    return f"the state database is damaged ({damage})\n  try: {REPAIR_REMEDY}" if damage else ""


def find_unrecorded_runs(home: Home, store: Store) -> list[str]:
    """Return the runs that have attempts on disk but are not in the record."""
    known = set(store.read(select(Run.id)))
    return sorted(
        path.name for path in home.runs.iterdir() if path.name not in known and home.newest_attempt(path.name)
    )


def find_record_problem(control: Control, *, since_last: bool = False) -> str:
    """Return the first problem of the record: a corrupt database or an event with a wrong hash; or "".

    Args:
        since_last: check only events after the last check, if the hash of its last event is unchanged. Only a
            full check notices changes of older events.
    """
    kept = control.home.root / VERIFIED_FILE
    if not since_last and (damage := find_damage(control.store)):
        return damage
    with control.store.snapshot() as session:
        seq, digest = _read_last_verified(session, kept) if since_last else (0, "")
        broken = verify_events(session, seq, digest)
        last = session.execute(select(Event.seq, Event.hash).order_by(Event.seq.desc()).limit(1)).first()
    if broken is not None:
        kept.unlink(missing_ok=True)
        return f"the hash of event {broken} does not match the event before it"
    if last is not None and last.seq != seq:
        write_json(kept, {"seq": last.seq, "hash": last.hash})
    return ""


def _read_last_verified(session: Session, kept: Path) -> tuple[int, str]:
    """Return the number and hash of the last verified event; (0, "") if that event has another hash now."""
    try:
        record = read_json(kept)
        seq, digest = int(record["seq"]), str(record["hash"])
    except (RequestError, KeyError, TypeError, ValueError):
        return 0, ""
    same = session.scalar(select(Event.hash).where(Event.seq == seq)) == digest
    return (seq, digest) if same else (0, "")


def find_run_problems(control: Control, run: Run) -> Iterator[str]:
    """Yield the differences between a run's files and what was recorded and signed, one sentence each.

    For a run that has not succeeded, only the bundle is checked.
    """
    frozen = control.home.bundle(run.id)
    if not frozen.is_dir():
        yield "the files of the run are missing"
        return
    yield from (f"bundle: {difference}" for difference in verify(frozen, run.bundle_digest))
    if run.state == RunState.SUCCEEDED:
        yield from _find_result_problems(control, run)


def _find_result_problems(control: Control, run: Run) -> Iterator[str]:
    """Yield differences between the signed statements of a succeeded run and its files."""
    evidence = evidence_paths(control.home, run.id, run.current_epoch)
    if not evidence.submitted.exists() and not evidence.result.exists():
        yield "the run was made before runs were signed, or its statements are missing"
        return
    if not evidence.bundle.is_dir():
        yield "the files of the attempt are missing"
        return
    yield from attestation_problems(evidence)
    if recorded_digest(evidence.bundle) != run.bundle_digest:
        yield f"the attempt ran a bundle other than {run.bundle_digest}"


def export(control: Control, run: Run, destination: Path, *, crate: bool = False) -> None:
    """Export a succeeded run: its evidence, the signed statements, and the public key.

    Args:
        destination: a new folder, created completely or not at all.
        crate: also describe it as a Process Run Crate (https://w3id.org/ro/wfrun/process).

    Raises:
        RequestError: the run has not succeeded, its evidence is damaged, or `destination` exists or cannot be
            written.
    """
    succeeded = run.state == RunState.SUCCEEDED
    problem = next(_find_result_problems(control, run), None) if succeeded else None
    if problem or not succeeded:
        why = f"its evidence is damaged: {problem}" if problem else f"it is {run.state}"
        remedy = f"perilune {'verify' if problem else 'explain'} {run.id}"
        raise RequestError(f"the run cannot be exported: {why}", where=f"run {run.id}", remedy=remedy)
    evidence = evidence_paths(control.home, run.id, run.current_epoch)
    with control.home.new_folder("export the run", destination) as building:
        for source in evidence.bundle.rglob("*"):  # just verified
            if source.is_file():
                target = building / "bundle" / source.relative_to(evidence.bundle)
                copy_file(source, target, source.stat().st_mode & 0o777)
        for source, name in (
            (evidence.submitted, f"attestations/{BUNDLE_STATEMENT}"),
            (evidence.result, f"attestations/{RESULT_STATEMENT}"),
            (evidence.key, PUBLIC),
        ):
            copy_file(source, building / name, 0o644)
        if crate:
            describe(building)
