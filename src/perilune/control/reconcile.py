"""Bring what is recorded and what is seen together, one run at a time. Safe to kill and repeat anywhere.

Every effect (staging, starting a worker) has its intent committed first, and is one that may be repeated:
staging is redone from nothing, and of several workers only one can claim an attempt. A per-run flock keeps
two processes from doing the same work twice; nothing depends on it for correctness.
"""

from __future__ import annotations

import time
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from perilune.bundle.storage import remove_tree
from perilune.control.attestation import attest_result
from perilune.control.evidence import evidence_problem, worker_said
from perilune.control.faults import reached
from perilune.control.home import Home, locked
from perilune.control.ledger import commit_result, current, done, intend, operations, started
from perilune.control.planner import RetryPolicy, Step, next_step
from perilune.control.store import Attempt, Run, Store, move_attempt, move_run, record
from perilune.control.transitions import AttemptState, Cleanup, Reachability, RunState
from perilune.errors import PeriluneError
from perilune.execution.observation import Observation
from perilune.execution.placements.local import LocalPlacement
from perilune.execution.processes import Presence, boot_id
from perilune.execution.verdict import Cause, Verdict, cause_of

LIVE_RUNS = (RunState.QUEUED.value, RunState.ACTIVE.value)


class Reconciler:
    """Observes and acts for the runs of one home."""

    def __init__(self, home: Home, store: Store, policy: RetryPolicy | None = None) -> None:
        self.home, self.store = home, store
        self.policy = policy or RetryPolicy()
        self.placement = LocalPlacement()

    def run(self, run_id: str) -> Run:
        """The run as recorded."""
        with self.store.snapshot() as session:
            return session.get_one(Run, run_id)

    def all(self, *, act: bool = True) -> list[Run]:
        """Reconcile every live run and return them; with `act=False` begin nothing, only finish."""
        with self.store.snapshot() as session:
            live = list(session.scalars(select(Run.id).where(Run.state.in_(LIVE_RUNS)).order_by(Run.id)))
        runs = [self.one(run_id, act=act) for run_id in live]
        for attempt in self.unclean():
            with locked(self.home.run(attempt.run_id)) as mine:
                if mine:
                    self._clean(attempt)
        self.sweep()
        return runs

    def unclean(self) -> list[Attempt]:
        """Ended attempts that are not proven to have stopped, oldest first. They are never forgotten."""
        with self.store.snapshot() as session:
            pending = select(Attempt).where(Attempt.cleanup == Cleanup.PENDING.value)
            return list(session.scalars(pending.order_by(Attempt.created)))

    def one(self, run_id: str, *, act: bool = True) -> Run:
        """Take a run as far as it goes now, unless another process is at it; returns it as recorded then."""
        with locked(self.home.run(run_id)) as mine:
            while mine and self._step(run_id, act):
                pass
        return self.run(run_id)

    def sweep(self) -> None:
        """Remove what submissions left that were killed before they were accepted."""
        self.home.sweep()
        found = {path.name for path in self.home.runs.iterdir()}
        for run_id in found - self._known():
            with locked(self.home.run(run_id)) as mine:  # its maker holds the lock until it is accepted
                if mine and run_id not in self._known():
                    remove_tree(self.home.run(run_id))

    def _known(self) -> set[str]:
        with self.store.snapshot() as session:
            return set(session.scalars(select(Run.id)))

    # One step; True when something changed and another may follow.

    def _step(self, run_id: str, act: bool) -> bool:  # noqa: PLR0911 - one return a row of the table
        with self.store.snapshot() as session:
            run = session.get_one(Run, run_id)
            attempt = session.get(Attempt, (run_id, run.current_epoch))
        state = RunState(run.state)
        if state.terminal:
            return False
        if state is RunState.QUEUED:
            return self._admit(run, attempt, act)
        assert attempt is not None
        directory = self.home.attempt(run_id, attempt.number)
        seen = self.placement.observe(directory, attempt.number)
        self._note_reachability(attempt, seen)
        match self._next(run, attempt, seen):
            case Step.WAIT | Step.UNREACHABLE:
                return False
            case Step.STAGE:
                return act and self._stage(run, attempt, directory)
            case Step.START:
                return act and self._start(attempt, directory)
            case Step.STOP:
                return self._stop(run, attempt, directory)  # the wish was for this, whatever the command is
            case Step.ADOPT:
                return self._adopt(attempt)
            case Step.FINALIZE:
                assert seen.verdict is not None
                return self._finalize(attempt, directory, seen.verdict)
            case Step.START_FAILED:
                self.placement.stop(directory, attempt.number)
                said = worker_said(directory) or "it said nothing"
                return self._end(
                    attempt, AttemptState.FAILED, Cause.START_FAILED, f"no worker came up: {said}"
                )
            case Step.DIED:
                return self._bury(attempt, directory, seen)
            case Step.LOSE:
                return self._lose(run, attempt, seen)

    def look(self, run: Run, attempt: Attempt) -> tuple[Observation, Step]:
        """What is seen of an active run's attempt, and the step that is next. Records and does nothing."""
        seen = self.placement.observe(self.home.attempt(run.id, attempt.number), attempt.number)
        return seen, self._next(run, attempt, seen)

    def _next(self, run: Run, attempt: Attempt, seen: Observation) -> Step:
        with self.store.snapshot() as session:
            starts = operations(session, run.id, attempt.number, "start")
        directory = self.home.attempt(run.id, attempt.number)
        return next_step(
            AttemptState(attempt.state),
            seen,
            cancel=run.desired == RunState.CANCELLED,
            force=run.forced,
            starting=self.placement.starting(directory, attempt.number),
            starts=starts,
            unseen_seconds=_unseen_seconds(attempt, seen),
            lost_after=self.policy.lost_after,
        )

    def _admit(self, run: Run, previous: Attempt | None, act: bool) -> bool:
        """QUEUED to ACTIVE with attempt N+1, once nothing of attempt N is left."""
        if run.desired == RunState.CANCELLED:
            with self.store.transaction() as session:
                move_run(session, session.get_one(Run, run.id), RunState.CANCELLED)
            return True
        if not act or time.time() < run.not_before:
            return False
        if previous is not None and not self._out_of_the_way(previous):
            return False
        with self.store.transaction() as session:
            run = session.get_one(Run, run.id)
            run.current_epoch += 1
            session.add(
                Attempt(
                    run_id=run.id,
                    number=run.current_epoch,
                    placement=self.placement.name,
                    launcher=self.placement.launcher,
                    created=time.time(),
                )
            )
            session.flush()
            record(session, "attempt.planned", run_id=run.id, epoch=run.current_epoch)
            move_run(session, run, RunState.ACTIVE)
        reached("admit.committed")
        return True

    def _stage(self, run: Run, attempt: Attempt, directory: Path) -> bool:
        with self.store.transaction() as session:
            row = current(session, attempt)
            if row.state == AttemptState.PLANNED:
                move_attempt(session, row, AttemptState.STAGING)
            key = intend(session, attempt, "stage")
        reached("stage.intended")
        order = {
            "run": run.id,
            "stage": run.stage,
            "epoch": attempt.number,
            "bundle_digest": run.bundle_digest,
        }
        try:
            self.placement.stage(self.home.bundle(run.id), directory, order, self._carried_from(run))
        except PeriluneError as error:
            cause = cause_of(error) if cause_of(error) is Cause.DISK_FULL else Cause.BUNDLE_REJECTED
            return self._end(attempt, AttemptState.FAILED, cause, str(error))
        reached("stage.done")
        with self.store.transaction() as session:
            done(session, key)
            move_attempt(session, current(session, attempt), AttemptState.STARTING)
        reached("stage.committed")
        return True

    def _carried_from(self, run: Run) -> Path | None:
        """The attempt whose complete checkpoints the next one starts from."""
        if run.current_epoch > 1:
            owner, number = run.id, run.current_epoch - 1
        elif run.retry_of is not None and self.run(run.retry_of).state != RunState.SUCCEEDED:
            owner, number = run.retry_of, self.run(run.retry_of).current_epoch
        else:
            return None
        path = self.home.attempt(owner, number)
        return path if path.is_dir() else None

    def _start(self, attempt: Attempt, directory: Path) -> bool:
        with self.store.transaction() as session:
            key = intend(session, attempt, "start")
        reached("start.intended")
        self.placement.start(directory, attempt.number)
        reached("start.done")
        with self.store.transaction() as session:
            done(session, key)
        return False  # it needs a moment to claim

    def _adopt(self, attempt: Attempt) -> bool:
        with self.store.transaction() as session:
            move_attempt(session, started(session, attempt), AttemptState.RUNNING)
        reached("adopt.committed")
        return False

    def _stop(self, run: Run, attempt: Attempt, directory: Path) -> bool:
        """End the attempt; CANCELLED only when it is proven, and not when it had succeeded first."""
        proven = self.placement.stop(directory, attempt.number)
        seen = self.placement.observe(directory, attempt.number)
        if seen.verdict is not None:
            return self._finalize(attempt, directory, seen.verdict)
        if not proven:
            return run.forced and self._lose(run, attempt, seen)
        return self._end(attempt, AttemptState.CANCELLED, Cause.STOPPED, "cancelled")

    def _bury(self, attempt: Attempt, directory: Path, seen: Observation) -> bool:
        again = self.placement.observe(directory, attempt.number)  # its last words may have come just now
        if again.verdict is not None:
            return self._finalize(attempt, directory, again.verdict)
        gone = seen.claim is None or seen.claim.end_leftovers()
        cleanup = Cleanup.DONE if gone else Cleanup.PENDING
        why = "the worker died without a result" if seen.claim else "its directory is gone"
        return self._end(attempt, AttemptState.FAILED, Cause.RUNNER_DIED, why, cleanup=cleanup)

    def _lose(self, run: Run, attempt: Attempt, seen: Observation) -> bool:
        """Give the attempt up. It may go on: its result is not taken, and it is stopped once seen."""
        if seen.superseded:
            why, cleanup = "a newer attempt has begun in its place", Cleanup.DONE
        elif run.forced:
            why, cleanup = "given up on request, not proven to have stopped", Cleanup.PENDING
        else:
            why, cleanup = f"not seen for {self.policy.lost_after:.0f} s", Cleanup.PENDING
        return self._end(attempt, AttemptState.LOST, Cause.UNREACHABLE, why, cleanup=cleanup)

    def _out_of_the_way(self, ended: Attempt) -> bool:
        """Whether another attempt may begin. A lost one is not waited for: it was fenced then."""
        return ended.cleanup != Cleanup.PENDING or ended.state == AttemptState.LOST or self._clean(ended)

    def _clean(self, attempt: Attempt) -> bool:
        """End what is left of an ended attempt; True when it is proven that nothing is."""
        directory = self.home.attempt(attempt.run_id, attempt.number)
        if not self.placement.stop(directory, attempt.number):
            return False
        with self.store.transaction() as session:
            row = session.get_one(Attempt, (attempt.run_id, attempt.number))
            row.cleanup = Cleanup.DONE.value
            record(session, "attempt.clean", run_id=attempt.run_id, epoch=attempt.number)
        return True

    def _finalize(self, attempt: Attempt, directory: Path, verdict: Verdict) -> bool:
        """Check the evidence and commit the result, once, if this is still the current attempt."""
        with self.store.transaction() as session:
            row = started(session, attempt)
            if row.state != AttemptState.FINALIZING:
                move_attempt(session, row, AttemptState.FINALIZING)
        reached("finalize.begun")
        cause, message = Cause(verdict.cause), verdict.message
        if verdict.succeeded and (problem := evidence_problem(directory, verdict)):
            cause, message = Cause.ARTIFACT_INVALID, problem
        if cause is Cause.NONE:
            attest_result(self.home, attempt, directory)
            state = AttemptState.SUCCEEDED
        elif cause is Cause.STOPPED:
            cancelled = self.run(attempt.run_id).desired == RunState.CANCELLED
            state = AttemptState.CANCELLED if cancelled else AttemptState.PREEMPTED
        else:
            state = AttemptState.FAILED
        self._end(attempt, state, cause, message, verdict=verdict)
        reached("finalize.committed")
        return True

    def _end(
        self,
        attempt: Attempt,
        state: AttemptState,
        cause: Cause,
        message: str,
        *,
        cleanup: Cleanup = Cleanup.DONE,
        verdict: Verdict | None = None,
    ) -> bool:
        """The attempt's last transition and what it means for its run, in one transaction."""
        with self.store.transaction() as session:
            row = current(session, attempt)
            row.cleanup = cleanup.value
            if cleanup is Cleanup.PENDING:
                record(session, "attempt.unclean", run_id=row.run_id, epoch=row.number)
            if verdict is not None:
                row.exit_code, row.signal = verdict.exit_code, verdict.signal
                row.manifest_digest = verdict.manifest_digest
            move_attempt(session, row, state, cause=cause.value, message=message)
            run = session.get_one(Run, attempt.run_id)
            if state is AttemptState.SUCCEEDED:
                assert verdict is not None
                commit_result(session, run, attempt.number, verdict)
            elif run.desired == RunState.CANCELLED:
                move_run(session, run, RunState.CANCELLED, cause=cause.value, message=message)
            elif self._may_retry(session, row):
                run.not_before = time.time() + self.policy.delay(attempt.number - 1)
                move_run(session, run, RunState.QUEUED, cause=cause.value, message=message)
            else:
                move_run(session, run, RunState.FAILED, cause=cause.value, message=message)
        return True

    def _may_retry(self, session: Session, ended: Attempt) -> bool:
        earlier = select(Attempt.cause).where(Attempt.run_id == ended.run_id, Attempt.number < ended.number)
        return self.policy.allows(ended.cause, list(session.scalars(earlier)))

    def _note_reachability(self, attempt: Attempt, seen: Observation) -> None:
        """Record whether the attempt can be seen, when that has changed."""
        if seen.claim is None:
            return
        hidden = seen.worker is Presence.UNKNOWN
        since = attempt.unreachable_since or {}
        moved = hidden and seen.heartbeat > since.get(
            "heartbeat", -1
        )  # its files are shared, and it counts on
        same_boot = since.get("boot_id") == boot_id()
        now = Reachability.UNREACHABLE if hidden else Reachability.REACHABLE
        if now == attempt.reachability and not (hidden and (moved or not same_boot)):
            return
        with self.store.transaction() as session:
            row = current(session, attempt)
            row.unreachable_since = (
                {"boot_id": boot_id(), "seconds": _boot_seconds(), "heartbeat": seen.heartbeat}
                if hidden
                else None
            )
            if row.reachability != now:
                row.reachability = now.value
                record(session, f"attempt.{now.value}", run_id=row.run_id, epoch=row.number)
        attempt.unreachable_since, attempt.reachability = row.unreachable_since, row.reachability


def _unseen_seconds(attempt: Attempt, seen: Observation) -> float:
    since = attempt.unreachable_since
    if since is None or seen.worker is not Presence.UNKNOWN or since["boot_id"] != boot_id():
        return 0.0
    return _boot_seconds() - float(since["seconds"])


def _boot_seconds() -> float:
    """Seconds since boot, suspended time included: no wall clock, which may jump."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
