"""How attempts end: stopped, died, lost, or with a verdict whose evidence is brought home and committed.

Every ending is one transaction, which only the current attempt of a run gets through. What an ended attempt
still holds elsewhere is removed afterwards, and the outcome does not depend on that.
"""

from __future__ import annotations

import contextlib

from perilune.control.evidence.attempt_evidence import evidence_problem
from perilune.control.evidence.attestation import attest_result
from perilune.control.record.conditions import Conditions, cleanup_of
from perilune.control.record.faults import reached
from perilune.control.record.home import Home
from perilune.control.record.ledger import end_attempt, started
from perilune.control.record.store import Attempt, Run, Store, move_attempt, record
from perilune.control.record.transitions import AttemptState, Cleanup, RunState
from perilune.control.runs.placements import Placements
from perilune.errors import WorkFailedError
from perilune.execution.hosts.protocol import HostRefusedError, HostUnreachableError
from perilune.execution.observation import Observation
from perilune.execution.placements.protocol import Assignment
from perilune.execution.verdict import Cause, Verdict

CONNECTION_ERRORS = (HostUnreachableError, HostRefusedError)


def assignment(home: Home, attempt: Attempt) -> Assignment:
    """The attempt as its placement knows it."""
    return Assignment(attempt.run_id, attempt.number, home.attempt(attempt.run_id, attempt.number))


class Endings:
    """Ends the attempts of one home. True from a method: something changed, and another step may follow."""

    def __init__(self, home: Home, store: Store, placements: Placements) -> None:
        self.home, self.store, self.placements = home, store, placements
        self.conditions = Conditions(store)

    def stop(self, run: Run, attempt: Attempt) -> bool:
        """End the attempt; CANCELLED only when it is proven, and not when it had succeeded first."""
        placement, there = self.placements.of(attempt.run_id), assignment(self.home, attempt)
        proven = placement.stop(there)
        seen = placement.observe(there)
        if seen.verdict is not None:
            return self.finalize(attempt, seen.verdict)
        if seen.unseen:
            return False
        if not proven:
            return run.forced and self.lose(run, attempt, seen)
        placement.pull(there, whole=True)
        return self.end(attempt, AttemptState.CANCELLED, Cause.STOPPED, "cancelled")

    def finalize_dead_attempt(self, attempt: Attempt, seen: Observation) -> bool:
        """End an attempt whose worker is positively dead."""
        placement, there = self.placements.of(attempt.run_id), assignment(self.home, attempt)
        again = placement.observe(there)  # its last words may have come just now
        if again.verdict is not None:
            return self.finalize(attempt, again.verdict)
        if again.unseen:
            return False
        gone = placement.stop(there)
        placement.pull(there, whole=True)
        cleanup = Cleanup.DONE if gone else Cleanup.PENDING
        why = "the worker died without a result" if seen.claim else "its directory is gone"
        return self.end(attempt, AttemptState.FAILED, Cause.RUNNER_DIED, why, cleanup=cleanup)

    def lose(self, run: Run, attempt: Attempt, seen: Observation) -> bool:
        """Give the attempt up. It may go on: its result is not taken, and it is stopped once seen."""
        if seen.superseded:
            why, cleanup = "a newer attempt has begun in its place", Cleanup.DONE
        elif run.forced:
            why, cleanup = "given up on request, not proven to have stopped", Cleanup.PENDING
        else:
            waited = self.placements.policy_of(run.id).lost_after
            why, cleanup = f"not seen for {waited:.0f} s", Cleanup.PENDING
        return self.end(attempt, AttemptState.LOST, Cause.UNREACHABLE, why, cleanup=cleanup)

    def may_be_replaced(self, ended: Attempt) -> bool:
        """Whether another attempt may begin. A lost one is not waited for: it was fenced then."""
        return ended.cleanup != Cleanup.PENDING or ended.state == AttemptState.LOST or self.clean(ended)

    def clean(self, attempt: Attempt) -> bool:
        """End what is left of an ended attempt; True when it is proven that nothing is.

        An error is recorded as a condition of the run, and does not raise.
        """
        with self.conditions.of(attempt.run_id, cleanup_of(attempt.number)):
            return self._clean(attempt)
        return False

    def _clean(self, attempt: Attempt) -> bool:
        """What a lost attempt has left elsewhere comes home first, as evidence. Of the others all is here,
        and the evidence that was committed is not touched again."""
        placement, there = self.placements.of(attempt.run_id), assignment(self.home, attempt)
        if not placement.stop(there):
            return False
        if attempt.state == AttemptState.LOST:
            with contextlib.suppress(WorkFailedError):
                placement.pull(there, whole=True)
        placement.remove(there)
        reached("clean.done")
        with self.store.transaction() as session:
            row = session.get_one(Attempt, (attempt.run_id, attempt.number))
            row.cleanup = Cleanup.DONE.value
            record(session, "attempt.cleaned_up", run_id=attempt.run_id, epoch=attempt.number)
        return True

    def finalize(self, attempt: Attempt, verdict: Verdict) -> bool:
        """Bring the evidence home, check it and commit the result, once, if the attempt is still current."""
        placement, there = self.placements.of(attempt.run_id), assignment(self.home, attempt)
        with self.store.transaction() as session:
            row = started(session, attempt)
            if row.state != AttemptState.FINALIZING:
                move_attempt(session, row, AttemptState.FINALIZING)
        reached("finalize.begun")
        cause, message = Cause(verdict.cause), verdict.message
        try:
            placement.pull(there, whole=True)
        except WorkFailedError as error:
            cause, message = (
                cause if cause is not Cause.NONE else Cause.ARTIFACT_INVALID,
                message or str(error),
            )
        reached("finalize.pulled")
        if cause is Cause.NONE and (problem := evidence_problem(there.directory, verdict)):
            if placement.observe(there).unseen:
                return False  # its machine went meanwhile, and what has not come says nothing of the task
            cause, message = Cause.ARTIFACT_INVALID, problem
        if cause is Cause.NONE:
            attest_result(self.home, attempt, there.directory)
            state = AttemptState.SUCCEEDED
        elif cause is Cause.STOPPED:
            with self.store.snapshot() as session:
                cancelled = session.get_one(Run, attempt.run_id).desired == RunState.CANCELLED
            state = AttemptState.CANCELLED if cancelled else AttemptState.PREEMPTED
        else:
            state = AttemptState.FAILED
        self.end(attempt, state, cause, message, verdict=verdict)
        reached("finalize.committed")
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
        """End the attempt, then remove what it holds elsewhere."""
        elsewhere = self.placements.capabilities(attempt.run_id).elsewhere
        if elsewhere and cleanup is not Cleanup.NONE:
            cleanup = Cleanup.PENDING
        policy = self.placements.policy_of(attempt.run_id)
        with self.store.transaction() as session:
            row = end_attempt(
                session,
                attempt,
                state,
                cause=cause,
                message=message,
                cleanup=cleanup,
                verdict=verdict,
                policy=policy,
            )
        reached("end.committed")
        if cleanup is Cleanup.PENDING and state is not AttemptState.LOST and elsewhere:
            self.clean(row)
        return True
