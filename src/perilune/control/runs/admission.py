"""Admit queued runs: start the next attempt of a run when its turn has come, under an unused number."""

import time

from perilune.control.machines.rented import Rentals
from perilune.control.record.faults import kill_point
from perilune.control.record.home import Home
from perilune.control.record.store import Attempt, Run, Store, move_run, record_event
from perilune.control.record.transitions import RunState
from perilune.control.runs.placements import Placements
from perilune.control.runs.queue import QueuePosition, find_position
from perilune.execution.placements.protocol import Assignment


class Admission:
    """Records new attempts. Staging and starting them is the reconciler's work."""

    def __init__(self, home: Home, store: Store, placements: Placements, rentals: Rentals) -> None:
        self.home, self.store, self.placements, self.rentals = home, store, placements, rentals

    def queue_position(self, run: Run) -> QueuePosition:
        with self.store.snapshot() as session:
            return find_position(session, self.placements, run)

    def admit(self, run: Run) -> bool:
        """Move a run from QUEUED to ACTIVE with its next attempt; False if that has to wait.

        Raises:
            HostUnreachableError, HostRefusedError: an older attempt that must be stopped cannot be reached.
        """
        placement = self.placements.get(run.id)
        rented = self.rentals.newest_epoch(placement, run)
        if rented is None or not self._stop_unrecorded(run):
            return False
        newest = max(rented, self.home.newest_attempt(run.id))
        with self.store.transaction() as session:
            run = session.get_one(Run, run.id)
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

    def _stop_unrecorded(self, run: Run) -> bool:
        """Stop attempts that have files but no record, as after a restore; True once they are stopped."""
        placement = self.placements.get(run.id)
        return all(
            placement.stop(Assignment(run.id, number, self.home.attempt(run.id, number)))
            for number in range(run.current_epoch + 1, self.home.newest_attempt(run.id) + 1)
        )
