"""From a run that waits to its next attempt: when its turn has come, and under a number nobody has had."""

from __future__ import annotations

import time

from perilune.control.machines.rented import Rentals
from perilune.control.record.faults import reached
from perilune.control.record.home import Home
from perilune.control.record.store import Attempt, Run, Store, move_run, record
from perilune.control.record.transitions import RunState
from perilune.control.runs.placements import Placements
from perilune.control.runs.queue import Turn, turn_of
from perilune.execution.placements.protocol import Assignment


class Admission:
    """Begins attempts in the record; everything else about them comes later."""

    def __init__(self, home: Home, store: Store, placements: Placements, rentals: Rentals) -> None:
        self.home, self.store, self.placements, self.rentals = home, store, placements, rentals

    def turn(self, run: Run) -> Turn:
        """Where a queued run stands."""
        with self.store.snapshot() as session:
            return turn_of(session, self.placements, run)

    def begin(self, run: Run) -> bool:
        """QUEUED to ACTIVE with the next attempt; False when that has to wait.

        Raises:
            HostUnreachableError, HostRefusedError: when what is in the way cannot be seen.
        """
        placement = self.placements.of(run.id)
        rented = self.rentals.newest_epoch(placement, run)
        if rented is None or not self._forgotten_are_gone(run):
            return False
        newest = max(rented, self.home.newest_attempt(run.id))
        with self.store.transaction() as session:
            run = session.get_one(Run, run.id)
            if not turn_of(session, self.placements, run).has_come:  # somebody was quicker
                return False
            run.current_epoch = max(run.current_epoch, newest) + 1
            where = {"placement": placement.name, "launcher": placement.launcher}
            session.add(Attempt(run_id=run.id, number=run.current_epoch, created=time.time(), **where))
            session.flush()
            record(session, "attempt.planned", run_id=run.id, epoch=run.current_epoch)
            move_run(session, run, RunState.ACTIVE)
        reached("admit.committed")
        return True

    def _forgotten_are_gone(self, run: Run) -> bool:
        """Whether attempts that have files and no record, which is older than they are, have been stopped."""
        placement = self.placements.of(run.id)
        return all(
            placement.stop(Assignment(run.id, number, self.home.attempt(run.id, number)))
            for number in range(run.current_epoch + 1, self.home.newest_attempt(run.id) + 1)
        )
