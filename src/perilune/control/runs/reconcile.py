"""Reconcile recorded and observed state, one run at a time. Safe to kill and repeat at any point.

The intent of every side effect (staging, starting a worker) is committed first, and every effect is
repeatable: staging starts over, and only one of several workers can claim an attempt. A flock per run keeps
two processes from doing the same work; correctness does not depend on it. A dropped connection does not stop
a run.
"""

import random
import time
from contextlib import suppress
from functools import partial
from threading import Semaphore

from sqlalchemy import select

from perilune.control.evidence.attempt_evidence import worker_output
from perilune.control.evidence.stale_folders import remove_stale_folders
from perilune.control.machines.lifecycle import Fleet
from perilune.control.machines.rented import Rentals
from perilune.control.record.conditions import HOME_CONDITION, Conditions
from perilune.control.record.faults import kill_point
from perilune.control.record.home import Home
from perilune.control.record.identity import read_inherited
from perilune.control.record.ledger import (
    count_intents,
    ensure_staging,
    ensure_starting,
    record_done,
    record_intent,
    require_current,
)
from perilune.control.record.store import (
    RUN_CONDITION,
    Attempt,
    Run,
    Store,
    move_attempt,
    move_run,
    record_event,
)
from perilune.control.record.transitions import AttemptState, Cleanup, RunState
from perilune.control.runs.current_submission import LIVE_STATES
from perilune.control.runs.endings import CONNECTION_ERRORS, Endings, make_assignment
from perilune.control.runs.placements import Placements
from perilune.control.runs.planner import RetryPolicy, Situation, Step, next_step
from perilune.control.runs.queue import find_position, retry_pause_left
from perilune.control.runs.reachability import note_reachability, unreachable_seconds
from perilune.errors import PeriluneError, WorkFailedError
from perilune.execution.background import in_background, wait_until
from perilune.execution.observation import Observation
from perilune.execution.placements.protocol import (
    Assignment,
    Placement,
    StagingCancelledError,
    StagingRequest,
)
from perilune.execution.verdict import Cause, describe_error, find_cause
from perilune.files import locked

MAX_REMOTE_LOOKS = 8  # other machines that are observed at once
PASS_TIMEOUT_S = 10.0  # for which a repeated pass over all runs waits for other machines
RETRY_PAUSE_S = 1.0  # pause after the first error of a run
MAX_PAUSE_S = 30.0  # seconds between two looks at an unreachable attempt


class Reconciler:
    """Observes and acts for the runs of one home."""

    def __init__(self, home: Home, store: Store, policy: RetryPolicy | None = None) -> None:
        self.home, self.store = home, store
        fleet = Fleet(home, store)
        self.placements = Placements(home, fleet, policy or RetryPolicy())
        self.endings = Endings(home, store, self.placements)
        self.rentals = Rentals(fleet, self.endings.end)
        self.conditions = Conditions(store)
        self._look_after: dict[str, float] = {}  # run to the time of its next look
        self._misses: dict[str, int] = {}  # run to the number of looks in a row that failed
        self._errors: dict[str, Exception] = {}  # run to the error of its last try
        self._returned: set[str] = set()  # runs that the last pass returned as live

    def run(self, run_id: str) -> Run:
        with self.store.snapshot() as session:
            return session.get_one(Run, run_id)

    def reconcile_all(self, *, act: bool = True, patience: float | None = None) -> list[Run]:
        """Reconcile every live run and return all of them; with `act=False` only finish, start nothing.

        Runs that the previous pass returned as live are returned once more if they have ended since.

        Runs on this machine are reconciled one after the other, runs on other machines concurrently. An error
        of a run or a machine is recorded as its condition and does not affect the others.

        Args:
            patience: seconds to wait for other machines. A transfer that takes longer continues meanwhile,
                and the next call leaves it alone. None waits for all.

        Raises:
            PeriluneError: the database is unusable.
        """
        live = self.store.read(select(Run.id).where(Run.state.in_(LIVE_STATES)).order_by(Run.id))
        far = [run_id for run_id in live if self.placements.capabilities(run_id).is_remote]
        deadline = None if patience is None else time.monotonic() + patience
        slots = Semaphore(MAX_REMOTE_LOOKS)
        looks = {run_id: in_background(partial(self._reconcile, run_id, act), slots) for run_id in far}
        for run_id in live:
            if run_id not in looks:
                self._reconcile(run_id, act)
        wait_until(deadline, *looks.values())
        self.clean_up(deadline)
        self.sweep()
        runs = self.store.read(select(Run).where(Run.id.in_(self._returned.union(live))).order_by(Run.id))
        self._returned = {run.id for run in runs if not RunState(run.state).is_terminal}
        return runs

    def clean_up(self, deadline: float | None = None) -> None:
        """Remove what ended attempts left on other machines, and reconcile every rented machine.

        Args:
            deadline: time of the monotonic clock until which to wait for the former.
        """
        slots = Semaphore(MAX_REMOTE_LOOKS)
        wait_until(
            deadline, *(in_background(partial(self._clean, row), slots) for row in self.unclean_attempts())
        )
        with self.conditions.guard(HOME_CONDITION, "rented machines"):
            self.rentals.reconcile_all()

    def _clean(self, attempt: Attempt) -> None:
        with locked(self.home.run(attempt.run_id) / "lock") as acquired:
            if acquired:
                self.endings.clean_up(attempt)

    def sweep(self) -> None:
        """Remove files that killed commands left in the home."""
        with self.conditions.guard(HOME_CONDITION, "sweep"):
            remove_stale_folders(self.home, self.store)

    def unclean_attempts(self) -> list[Attempt]:
        """Return the ended attempts that are not proven to have stopped, oldest first."""
        others = read_inherited(self.home).runs
        pending = select(Attempt).where(
            Attempt.cleanup == Cleanup.PENDING.value, Attempt.run_id.not_in(others)
        )
        return self.store.read(pending.order_by(Attempt.created))

    def reconcile(self, run_id: str, *, act: bool = True) -> Run:
        """Reconcile a run, unless another process does; returns it as recorded then.

        Machines of ended attempts that this process manages are reconciled too.

        Raises:
            Exception: with `act`, the error of the run's condition, unless it is a connection error.
        """
        if self._reconcile(run_id, act):
            self.rentals.reconcile_managed()
        error = self._errors.get(run_id)
        if act and error is not None and not isinstance(error, CONNECTION_ERRORS):
            raise error
        return self.run(run_id)

    def _reconcile(self, run_id: str, act: bool) -> bool:
        """Reconcile a run; False if the next look is not due yet, or the run belongs to another home."""
        if (now := time.monotonic()) < self._look_after.get(run_id, 0.0):
            return False
        if run_id in read_inherited(self.home).runs:
            return False
        with locked(self.home.run(run_id) / "lock") as acquired:
            if acquired:
                self._advance(run_id, act)
        self._look_after[run_id] = now + self._pause(run_id)
        return True

    def _advance(self, run_id: str, act: bool) -> None:
        """Take steps until nothing changes. Records an error, and backs off after repeated errors."""
        misses = self._misses.get(run_id, 0)
        with self.conditions.guard(run_id, RUN_CONDITION, clears=act) as work:
            while self._step(run_id, act):
                pass
        if work.error is not None and self.run(run_id).forced:
            with self.conditions.guard(run_id, RUN_CONDITION) as work:
                self._give_up(run_id)
        if work.error is None:
            self._errors.pop(run_id, None)
        else:
            self._errors[run_id] = work.error
            self._misses[run_id] = misses + 1

    def reset_backoff(self, run_id: str) -> None:
        """Make the next look at a run due now, whatever the backoff."""
        self._look_after.pop(run_id, None)

    def _pause(self, run_id: str) -> float:
        """Return the seconds until the next look, with exponential backoff while the run is unreachable."""
        interval, misses = self.placements.capabilities(run_id).look_interval_s, self._misses.get(run_id, 0)
        if run_id in self._errors:
            interval = max(interval, RETRY_PAUSE_S)
        if misses == 0:
            return interval
        return random.uniform(0.5, 1.0) * min(MAX_PAUSE_S, interval * 2.0**misses)

    # The methods below take one step. True means that something changed and another step may follow.

    def _step(self, run_id: str, act: bool) -> bool:
        with self.store.snapshot() as session:
            run = session.get_one(Run, run_id)
            attempt = session.get(Attempt, (run_id, run.current_epoch))
        state = RunState(run.state)
        if state.is_terminal:
            return False
        if state is RunState.QUEUED:
            return self._admit(run, attempt, act)
        assert attempt is not None
        placement, assigned = self.placements.get(attempt.run_id), make_assignment(self.home, attempt)
        if not self.rentals.provide_machines(placement, run, attempt, assigned, act):
            return False
        observation = self._observe(attempt)
        note_reachability(self.store, attempt, observation)
        self._misses[run_id] = self._misses.get(run_id, 0) + 1 if observation.is_hidden else 0
        return self._act(run, attempt, observation, self._next_step(run, attempt, observation), act)

    def _act(  # noqa: PLR0911 - one return per row of the table
        self, run: Run, attempt: Attempt, observation: Observation, step: Step, act: bool
    ) -> bool:
        placement, assigned = self.placements.get(attempt.run_id), make_assignment(self.home, attempt)
        match step:
            case Step.UNREACHABLE:
                return False
            case Step.WAIT:
                if observation.claim is not None and observation.more:
                    placement.pull(assigned)
                return False
            case Step.STAGE:
                return act and self._stage(run, attempt)
            case Step.START:
                return act and self._start(attempt)
            case Step.STOP:
                return self.endings.stop(run, attempt)  # the user requested it, so also without `act`
            case Step.ADOPT:
                return self._adopt(attempt)
            case Step.FINALIZE:
                assert observation.verdict is not None
                return self.endings.finalize(attempt, observation.verdict)
            case Step.START_FAILED:
                placement.stop(assigned)
                output = worker_output(assigned.directory) or "it printed nothing"
                why = f"the worker did not start: {output}"
                return self.endings.end(attempt, AttemptState.FAILED, Cause.START_FAILED, why)
            case Step.DIED:
                return self.endings.finalize_dead_attempt(attempt, observation)
            case Step.LOSE:
                self._misses.pop(run.id, None)  # the next attempt may be reachable
                return self.endings.abandon(run, attempt, observation)
            case Step.REFUSED:
                with self.store.transaction() as session:
                    ensure_staging(session, attempt)
                return self.endings.end(
                    attempt, AttemptState.FAILED, Cause.HOST_REFUSED, observation.unseen, cleanup=Cleanup.NONE
                )

    def observe(self, run: Run, attempt: Attempt) -> tuple[Observation, Step]:
        """Observe an active run's attempt, and say which step is next. Changes nothing."""
        observation = self._observe(attempt)
        try:
            return observation, self._next_step(run, attempt, observation)
        except Exception as error:
            return Observation(unseen=describe_error(error)), Step.UNREACHABLE

    def _observe(self, attempt: Attempt) -> Observation:
        """Observe an attempt. After an error nothing is known, and `unseen` holds the error."""
        try:
            return self.placements.get(attempt.run_id).observe(make_assignment(self.home, attempt))
        except Exception as error:
            return Observation(unseen=describe_error(error))

    def _give_up(self, run_id: str) -> None:
        """End a run that the user gave up, although an error keeps it from being stopped."""
        with self.store.snapshot() as session:
            run = session.get_one(Run, run_id)
            attempt = session.get(Attempt, (run_id, run.current_epoch))
        if run.state == RunState.ACTIVE and attempt is not None:
            self.endings.abandon(run, attempt, Observation())

    def _next_step(self, run: Run, attempt: Attempt, observation: Observation) -> Step:
        with self.store.snapshot() as session:
            starts = count_intents(session, run.id, attempt.number, "start")
        situation = Situation(
            cancel=run.desired == RunState.CANCELLED,
            force=run.forced,
            starting=self.placements.get(attempt.run_id).is_starting(make_assignment(self.home, attempt)),
            starts=starts,
            unseen_seconds=unreachable_seconds(attempt, observation),
            lost_after=self.placements.retry_policy(run.id).lost_after,
        )
        return next_step(AttemptState(attempt.state), observation, situation)

    def _admit(self, run: Run, previous: Attempt | None, act: bool) -> bool:
        """Move a run from QUEUED to ACTIVE with attempt N+1, once attempt N is cleaned up."""
        if run.desired == RunState.CANCELLED:
            with self.store.transaction() as session:
                move_run(session, session.get_one(Run, run.id), RunState.CANCELLED)
            return True
        if not act or retry_pause_left(self.placements, run):
            return False
        if previous is not None and not self.endings.can_replace(previous):
            return False
        with self.store.snapshot() as session:
            turn = find_position(session, self.placements, run)
        if not turn.can_start:
            for other in (*turn.running, *turn.ahead):  # perhaps no other process reconciles them
                self._reconcile(other, act=True)
            return False
        placement = self.placements.get(run.id)
        rented = self.rentals.newest_epoch(placement, run)
        if rented is None or not self._stop_unrecorded(run, placement):
            return False
        return self._add_attempt(run.id, placement, max(rented, self.home.newest_attempt(run.id)))

    def _stop_unrecorded(self, run: Run, placement: Placement) -> bool:
        """Stop attempts that have files but no record, as after a restore; True once they are stopped."""
        return all(
            placement.stop(Assignment(run.id, number, self.home.attempt(run.id, number)))
            for number in range(run.current_epoch + 1, self.home.newest_attempt(run.id) + 1)
        )

    def _add_attempt(self, run_id: str, placement: Placement, newest: int) -> bool:
        """Record the next attempt, with a number above `newest`; False if the run has to wait again."""
        with self.store.transaction() as session:
            run = session.get_one(Run, run_id)
            if not find_position(session, self.placements, run).can_start:  # another process was faster
                return False
            run.current_epoch = max(run.current_epoch, newest) + 1
            where = {"placement": placement.name, "launcher": placement.launcher}
            session.add(Attempt(run_id=run.id, number=run.current_epoch, created=time.time(), **where))
            session.flush()
            record_event(session, "attempt.planned", run_id=run.id, epoch=run.current_epoch)
            move_run(session, run, RunState.ACTIVE)
        kill_point("admit.committed")
        return True

    def _stage(self, run: Run, attempt: Attempt) -> bool:
        with self.store.transaction() as session:
            ensure_staging(session, attempt)
            key = record_intent(session, attempt, "stage")
        kill_point("stage.intended")
        run_info = {
            "run": run.id,
            "stage": run.stage,
            "epoch": attempt.number,
            "bundle_digest": run.bundle_digest,
        }
        previous, is_cancelled = self._find_resume_attempt(run), partial(self._is_cancelled, run.id)
        request = StagingRequest(self.home.bundle(run.id), run_info, previous, is_cancelled)
        try:
            placement, assigned = self.placements.get(attempt.run_id), make_assignment(self.home, attempt)
            starts_over = placement.stage(assigned, request)
        except CONNECTION_ERRORS:
            raise
        except StagingCancelledError:
            return True
        except PeriluneError as error:
            damaged = Cause.TRANSFER_FAILED if isinstance(error, WorkFailedError) else Cause.BUNDLE_REJECTED
            cause = find_cause(error) if find_cause(error) is Cause.DISK_FULL else damaged
            return self.endings.end(attempt, AttemptState.FAILED, cause, str(error))
        kill_point("stage.done")
        with self.store.transaction() as session:
            record_done(session, key)
            row = require_current(session, attempt)
            if starts_over:
                row.message = starts_over
                record_event(
                    session, "attempt.starts_over", run_id=run.id, epoch=attempt.number, why=starts_over
                )
            move_attempt(session, row, AttemptState.STARTING)
        kill_point("stage.committed")
        return True

    def _is_cancelled(self, run_id: str) -> bool:
        """Return whether the user wants a run stopped; False while the database does not answer."""
        with suppress(PeriluneError):
            return self.run(run_id).desired == RunState.CANCELLED
        return False

    def _find_resume_attempt(self, run: Run) -> Assignment | None:
        """Return the last attempt with a directory, from whose complete checkpoints the next one starts.

        An attempt that ended before it was staged has none.
        """
        newest = run.current_epoch - 1
        while True:
            for number in range(newest, 0, -1):
                if (path := self.home.attempt(run.id, number)).is_dir():
                    return Assignment(run.id, number, path)
            if run.retry_of is None or self.run(run.retry_of).state == RunState.SUCCEEDED:
                return None
            run = self.run(run.retry_of)
            newest = run.current_epoch

    def _start(self, attempt: Attempt) -> bool:
        placement = self.placements.get(attempt.run_id)
        with self.store.transaction() as session:
            key = record_intent(session, attempt, "start")
        kill_point("start.intended")
        try:
            placement.start(make_assignment(self.home, attempt))
        except CONNECTION_ERRORS:
            raise
        except PeriluneError as error:
            cause = Cause.START_FAILED if isinstance(error, WorkFailedError) else find_cause(error)
            return self.endings.end(attempt, AttemptState.FAILED, cause, str(error))
        kill_point("start.done")
        with self.store.transaction() as session:
            record_done(session, key)
        return placement.capabilities.is_remote  # on this machine the worker needs a moment to claim

    def _adopt(self, attempt: Attempt) -> bool:
        with self.store.transaction() as session:
            move_attempt(session, ensure_starting(session, attempt), AttemptState.RUNNING)
        kill_point("adopt.committed")
        return False
