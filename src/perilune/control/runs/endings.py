"""End attempts: stopped, dead, lost, or with a verdict whose evidence is collected and committed.

Each ending is one transaction, which only the current attempt of a run passes. Whatever an ended attempt
still has on another machine is removed afterwards; the outcome does not depend on that.
"""

import contextlib

from perilune.control.evidence.attempt_evidence import find_evidence_problem, unfetched_files
from perilune.control.evidence.attestation import attest_removal, attest_result
from perilune.control.record.conditions import Conditions, cleanup_subject
from perilune.control.record.faults import kill_point
from perilune.control.record.home import Home
from perilune.control.record.ledger import Outcome, end_attempt, ensure_starting
from perilune.control.record.store import Attempt, Run, Store, move_attempt, record_event
from perilune.control.record.transitions import AttemptState, Cleanup, RunState
from perilune.control.runs.placements import Placements
from perilune.errors import WorkFailedError
from perilune.execution.hosts.protocol import HostRefusedError, HostUnreachableError
from perilune.execution.observation import Observation
from perilune.execution.placements.protocol import Assignment
from perilune.execution.verdict import Cause, Verdict

CONNECTION_ERRORS = (HostUnreachableError, HostRefusedError)


def make_assignment(home: Home, attempt: Attempt) -> Assignment:
    """Return the attempt as a placement identifies it."""
    return Assignment(attempt.run_id, attempt.number, home.attempt(attempt.run_id, attempt.number))


class Endings:
    """Ends the attempts of one home. Methods return True if something changed and another step may follow."""

    def __init__(self, home: Home, store: Store, placements: Placements) -> None:
        self.home, self.store, self.placements = home, store, placements
        self.conditions = Conditions(store)

    def stop(self, run: Run, attempt: Attempt) -> bool:
        """Stop the attempt. It becomes CANCELLED once that is proven, unless it has left a verdict before."""
        placement, assigned = self.placements.get(attempt.run_id), make_assignment(self.home, attempt)
        proven = placement.stop(assigned)
        observation = placement.observe(assigned)
        if observation.verdict is not None:
            return self.finalize(attempt, observation.verdict)
        if observation.unseen:
            return False
        if not proven:
            return run.forced and self.abandon(run, attempt, observation)
        placement.pull(assigned, whole=True)
        return self.end(attempt, AttemptState.CANCELLED, Cause.STOPPED, "cancelled")

    def finalize_dead_attempt(self, attempt: Attempt, observation: Observation) -> bool:
        """End an attempt whose worker is proven dead."""
        placement, assigned = self.placements.get(attempt.run_id), make_assignment(self.home, attempt)
        latest = placement.observe(assigned)  # the worker may have written a verdict since `observation`
        if latest.verdict is not None:
            return self.finalize(attempt, latest.verdict)
        if latest.unseen:
            return False
        gone = placement.stop(assigned)
        placement.pull(assigned, whole=True)
        cleanup = Cleanup.DONE if gone else Cleanup.PENDING
        why = "the worker died without a result" if observation.claim else "its directory is gone"
        return self.end(attempt, AttemptState.FAILED, Cause.RUNNER_DIED, why, cleanup=cleanup)

    def abandon(self, run: Run, attempt: Attempt, observation: Observation) -> bool:
        """Give up an attempt that may still run: its result is rejected, and it is stopped when reachable."""
        if observation.superseded:
            why, cleanup = "a newer attempt has started in its place", Cleanup.DONE
        elif run.forced:
            why, cleanup = "abandoned on request; not proven to have stopped", Cleanup.PENDING
        else:
            waited = self.placements.retry_policy(run.id).lost_after
            why, cleanup = f"unreachable for {waited:.0f} s", Cleanup.PENDING
        return self.end(attempt, AttemptState.LOST, Cause.UNREACHABLE, why, cleanup=cleanup)

    def can_replace(self, ended: Attempt) -> bool:
        """Return whether the next attempt may start. A lost attempt is fenced off and needs no cleanup."""
        return ended.cleanup != Cleanup.PENDING or ended.state == AttemptState.LOST or self.clean_up(ended)

    def clean_up(self, attempt: Attempt) -> bool:
        """Remove everything left of an ended attempt; True when that is proven.

        Records an error as a condition of the run instead of raising it.
        """
        is_clean = False
        with self.conditions.guard(attempt.run_id, cleanup_subject(attempt.number)):
            is_clean = self._clean(attempt)
        return is_clean  # noqa: RET504 - the block suppresses errors

    def _clean(self, attempt: Attempt) -> bool:
        placement, assigned = self.placements.get(attempt.run_id), make_assignment(self.home, attempt)
        if not placement.stop(assigned):
            return False
        if attempt.state == AttemptState.LOST:  # the evidence of other attempts is already complete
            with contextlib.suppress(WorkFailedError):
                placement.pull(assigned, whole=True)
        placement.remove(assigned)
        kill_point("clean.done")
        with self.store.transaction() as session:
            row = session.get_one(Attempt, (attempt.run_id, attempt.number))
            row.cleanup = Cleanup.DONE.value
            record_event(session, "attempt.cleaned_up", run_id=attempt.run_id, epoch=attempt.number)
        return True

    def finalize(self, attempt: Attempt, verdict: Verdict) -> bool:
        """Collect and check the evidence and commit the result, once, if the attempt is still current."""
        placement, assigned = self.placements.get(attempt.run_id), make_assignment(self.home, attempt)
        with self.store.transaction() as session:
            row = ensure_starting(session, attempt)
            if row.state != AttemptState.FINALIZING:
                move_attempt(session, row, AttemptState.FINALIZING)
        kill_point("finalize.begun")
        cause, message = Cause(verdict.cause), verdict.message
        try:
            placement.pull(assigned, whole=True)
        except WorkFailedError as error:
            if cause is Cause.NONE:
                cause = Cause.ARTIFACT_INVALID
            message = message or str(error)
        kill_point("finalize.pulled")
        left = unfetched_files(assigned.directory, self.placements.bring_setting(attempt.run_id))
        if cause is Cause.NONE and (problem := find_evidence_problem(assigned.directory, verdict, left)):
            if placement.observe(assigned).unseen:
                return False  # its machine went away meanwhile, so missing files are not the task's fault
            cause, message = Cause.ARTIFACT_INVALID, problem
        if left:
            attest_removal(self.home, attempt.run_id, attempt.number, left)
        if cause is Cause.NONE:
            attest_result(self.home, attempt, assigned.directory)
            state = AttemptState.SUCCEEDED
        elif cause is Cause.STOPPED:
            with self.store.snapshot() as session:
                cancelled = session.get_one(Run, attempt.run_id).desired == RunState.CANCELLED
            state = AttemptState.CANCELLED if cancelled else AttemptState.PREEMPTED
        else:
            state = AttemptState.FAILED
        self.end(attempt, state, cause, message, verdict=verdict)
        kill_point("finalize.committed")
        return True

    def end(
        self,
        attempt: Attempt,
        state: AttemptState,
        cause: Cause,
        message: str,
        *,
        cleanup: Cleanup = Cleanup.DONE,
        verdict: Verdict | None = None,
    ) -> bool:
        """End the attempt, then remove what it has on other machines."""
        elsewhere = self.placements.capabilities(attempt.run_id).is_remote
        if elsewhere and cleanup is not Cleanup.NONE:
            cleanup = Cleanup.PENDING
        policy = self.placements.retry_policy(attempt.run_id)
        with self.store.transaction() as session:
            outcome = Outcome(state, cause, message, verdict)
            row = end_attempt(session, attempt, outcome, cleanup, policy)
        kill_point("end.committed")
        if cleanup is Cleanup.PENDING and state is not AttemptState.LOST and elsewhere:
            self.clean_up(row)
        return True
