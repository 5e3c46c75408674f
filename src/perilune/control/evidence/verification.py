"""Is everything as it was recorded? The record itself, and the evidence of runs that have succeeded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from perilune.bundle.attested import BUNDLE_STATEMENT, RESULT_STATEMENT, tampered
from perilune.bundle.crate import describe
from perilune.bundle.digest import recorded_digest
from perilune.bundle.envelope import PUBLIC
from perilune.bundle.storage import new_folder, place
from perilune.bundle.verify import verify
from perilune.control.evidence.attestation import evidence_of
from perilune.control.record.database import REPAIR, DamagedError
from perilune.control.record.home import Home
from perilune.control.record.store import Event, Run, Store, verify_events
from perilune.control.record.transitions import RunState
from perilune.control.runs.experiments import Control
from perilune.errors import RequestError
from perilune.files import read_json, write_json

VERIFIED = "verified.json"  # in the home: up to which event the record has been checked


def damage(store: Store) -> str:
    """What is broken in the database itself, and what to do about it; "" when nothing is."""
    try:
        with store.snapshot() as session:
            found = store.database.damage(session.connection())
    except DamagedError as error:
        return str(error)
    return f"the state database is damaged ({found})\n  try: {REPAIR}" if found else ""


def unrecorded(home: Home, store: Store) -> list[str]:
    """Runs that have attempts on the disk and are not in the record."""
    with store.snapshot() as session:
        known = set(session.scalars(select(Run.id)))
    return sorted(
        path.name for path in home.runs.iterdir() if path.name not in known and home.newest_attempt(path.name)
    )


def record_problem(control: Control, *, since_last: bool = False) -> str:
    """What is wrong with the record: "" when the database is whole and each event follows from the last.

    Args:
        since_last: look at events only, and begin where the last check ended, if that event still has the
            hash it had then. What was changed before it, only a full check sees.
    """
    kept = control.home.root / VERIFIED
    if not since_last and (found := damage(control.store)):
        return found
    with control.store.snapshot() as session:
        seq, digest = _verified(session, kept) if since_last else (0, "")
        broken = verify_events(session, seq, digest)
        last = session.execute(select(Event.seq, Event.hash).order_by(Event.seq.desc()).limit(1)).first()
    if broken is not None:
        kept.unlink(missing_ok=True)
        return f"event {broken} does not follow from the one before it"
    if last is not None and last.seq != seq:
        write_json(kept, {"seq": last.seq, "hash": last.hash})
    return ""


def _verified(session: Session, kept: Path) -> tuple[int, str]:
    """Number and hash of the event that the last check ended with; the beginning when that is another now."""
    try:
        found = read_json(kept)
        seq, digest = int(found["seq"]), str(found["hash"])
    except (RequestError, KeyError, TypeError, ValueError):
        return 0, ""
    same = session.scalar(select(Event.hash).where(Event.seq == seq)) == digest
    return (seq, digest) if same else (0, "")


def run_problems(control: Control, run: Run) -> Iterator[str]:
    """What of a run is not as it was recorded and signed, a sentence each.

    Of a run that has not succeeded there is no result: its bundle alone is looked at.
    """
    frozen = control.home.bundle(run.id)
    yield from (f"bundle: {difference}" for difference in verify(frozen, run.bundle_digest))
    if run.state == RunState.SUCCEEDED:
        yield from _result_problems(control, run)


def _result_problems(control: Control, run: Run) -> Iterator[str]:
    """What of a succeeded run's result, which includes the bundle it was made with, is not as attested."""
    evidence = evidence_of(control.home, run.id, run.current_epoch)
    if not evidence.submitted.exists() and not evidence.result.exists():
        yield "it was made before runs were signed, or its statements are gone"
        return
    yield from tampered(evidence)
    if recorded_digest(evidence.bundle) != run.bundle_digest:
        yield f"the attempt ran another bundle than {run.bundle_digest}"


def export(control: Control, run: Run, destination: Path, *, crate: bool = False) -> None:
    """Hand a succeeded run over: its evidence, what was signed about it, and the key to check that with.

    Args:
        destination: a folder that does not exist; it is there whole or not at all.
        crate: also describe it as a Process Run Crate (https://w3id.org/ro/wfrun/process).

    Raises:
        RequestError: when the run has not succeeded, something is at `destination`, or it cannot be written.
        WorkFailedError: when the evidence is damaged.
    """
    succeeded = run.state == RunState.SUCCEEDED
    problem = next(_result_problems(control, run), None) if succeeded else None
    if problem or not succeeded:
        why = f"its evidence is damaged: {problem}" if problem else f"it is {run.state}"
        raise RequestError(f"the run cannot be handed over: {why}", where=f"run {run.id}")
    evidence = evidence_of(control.home, run.id, run.current_epoch)
    with new_folder("export the run", destination) as building:
        for source in evidence.bundle.rglob("*"):  # has just been checked
            if source.is_file():
                target = building / "bundle" / source.relative_to(evidence.bundle)
                place(source, target, source.stat().st_mode & 0o777)
        for source, name in (
            (evidence.submitted, f"attestations/{BUNDLE_STATEMENT}"),
            (evidence.result, f"attestations/{RESULT_STATEMENT}"),
            (evidence.key, PUBLIC),
        ):
            place(source, building / name, 0o644)
        if crate:
            describe(building)
