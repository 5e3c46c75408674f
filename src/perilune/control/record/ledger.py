"""Record intents, states and results of attempts, only while an attempt is its run's current one."""

import time
from dataclasses import dataclass

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from perilune.control.record.store import Attempt, Operation, Run, move_attempt, move_run, record_event
from perilune.control.record.transitions import AttemptState, Cleanup, RunState
from perilune.control.runs.current_submission import end_submissions_of
from perilune.control.runs.planner import RetryPolicy
from perilune.errors import WorkFailedError
from perilune.execution.verdict import Cause, Verdict


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an attempt. `verdict` is None if its worker left none."""

    state: AttemptState
    cause: Cause
    message: str
    verdict: Verdict | None = None


def commit_result(session: Session, run: Run, epoch: int, verdict: Verdict) -> None:
    """Make `verdict` the result of its run, once, and only while its attempt is the current one.

    Raises:
        WorkFailedError: a newer attempt has started, or the run has ended.
    """
    fenced = (
        update(Run)
        .where(Run.id == run.id, Run.current_epoch == epoch, Run.state == RunState.ACTIVE.value)
        .values(manifest_digest=verdict.manifest_digest)
    )
    if session.connection().execute(fenced).rowcount != 1:
        raise WorkFailedError(f"attempt {epoch} is out of date; its result is ignored", where=f"run {run.id}")
    session.refresh(run)
    move_run(session, run, RunState.SUCCEEDED)


def end_attempt(
    session: Session, attempt: Attempt, outcome: Outcome, cleanup: Cleanup, policy: RetryPolicy
) -> Attempt:
    """Record an attempt's last transition, and end its run or queue the run for another attempt."""
    row, verdict = require_current(session, attempt), outcome.verdict
    cause, message = outcome.cause.value, outcome.message
    row.cleanup = cleanup.value
    if cleanup is Cleanup.PENDING:
        record_event(session, "attempt.cleanup_pending", run_id=row.run_id, epoch=row.number)
    if verdict is not None:
        row.exit_code, row.signal = verdict.exit_code, verdict.signal
        row.manifest_digest = verdict.manifest_digest
    move_attempt(session, row, outcome.state, cause=cause, message=message)
    run = session.get_one(Run, attempt.run_id)
    earlier = select(Attempt.cause).where(Attempt.run_id == run.id, Attempt.number < row.number)
    if outcome.state is AttemptState.SUCCEEDED:
        assert verdict is not None
        commit_result(session, run, row.number, verdict)
    elif run.desired == RunState.CANCELLED:
        move_run(session, run, RunState.CANCELLED, cause=cause, message=message)
    elif policy.allows_retry(row.cause, list(session.scalars(earlier))):
        run.not_before = time.time() + policy.sample_delay(row.number - 1)
        move_run(session, run, RunState.QUEUED, cause=cause, message=message)
    else:
        move_run(session, run, RunState.FAILED, cause=cause, message=message)
        end_submissions_of(session, run, "failed")
    return row


def require_current(session: Session, attempt: Attempt) -> Attempt:
    """Return the attempt's row. Raises WorkFailedError unless it is the current epoch of its run."""
    run = session.get_one(Run, attempt.run_id)
    if run.current_epoch != attempt.number:
        raise WorkFailedError(f"attempt {attempt.number} is out of date", where=f"run {run.id}")
    return session.get_one(Attempt, (attempt.run_id, attempt.number))


def ensure_provisioning(session: Session, attempt: Attempt) -> Attempt:
    """Move an attempt from PLANNED to PROVISIONING unless it is there or further; returns its row."""
    row = require_current(session, attempt)
    if row.state == AttemptState.PLANNED:
        move_attempt(session, row, AttemptState.PROVISIONING)
    return row


def ensure_staging(session: Session, attempt: Attempt) -> Attempt:
    """Move an attempt to STAGING unless it is there or further; returns its row."""
    row = require_current(session, attempt)
    if row.state in {AttemptState.PLANNED, AttemptState.PROVISIONING}:
        move_attempt(session, row, AttemptState.STAGING)
    return row


def ensure_starting(session: Session, attempt: Attempt) -> Attempt:
    """Move an attempt whose claim was observed to STARTING unless it is there or further; returns its row."""
    row = require_current(session, attempt)
    for before, after in (
        (AttemptState.PLANNED, AttemptState.STAGING),
        (AttemptState.STAGING, AttemptState.STARTING),
    ):
        if row.state == before:
            move_attempt(session, row, after)
    settle_intents(session, row, "stage", "start")
    return row


def record_intent(session: Session, attempt: Attempt, verb: str) -> str:
    """Record that a side effect is about to happen; returns its key."""
    ordinal = count_intents(session, attempt.run_id, attempt.number, verb) + 1
    key = f"{attempt.run_id}/{attempt.number}/{verb}/{ordinal}"
    session.add(
        Operation(key=key, run_id=attempt.run_id, epoch=attempt.number, verb=verb, created=time.time())
    )
    record_event(session, f"{verb}.intended", run_id=attempt.run_id, epoch=attempt.number, key=key)
    return key


def record_done(session: Session, key: str) -> None:
    """Record that the side effect with this key has happened."""
    operation = session.get_one(Operation, key)
    operation.status, operation.ended = "done", time.time()
    record_event(session, f"{operation.verb}.done", run_id=operation.run_id, epoch=operation.epoch, key=key)


def settle_intents(session: Session, attempt: Attempt, *verbs: str) -> None:
    """Record intended effects as done, because they were observed although their call was interrupted."""
    of_attempt = (Operation.run_id == attempt.run_id) & (Operation.epoch == attempt.number)
    for operation in session.scalars(select(Operation).where(of_attempt, Operation.status == "intent")):
        if operation.verb in verbs:
            record_done(session, operation.key)


def count_intents(session: Session, run_id: str, epoch: int, verb: str) -> int:
    """Return how many effects of one kind were intended for an attempt."""
    query = select(func.count()).where(
        Operation.run_id == run_id, Operation.epoch == epoch, Operation.verb == verb
    )
    return session.scalar(query) or 0
