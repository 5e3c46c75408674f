"""The queue of a placement with slots: by priority, then in the order of submission."""

import time
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from perilune.control.record.identity import read_inherited
from perilune.control.record.store import Run
from perilune.control.record.transitions import RunState
from perilune.control.runs.placements import Placements
from perilune.control.runs.templates import Template

LAST_ID = "~"  # sorts after every run id


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """The position of a queued run.

    Attributes:
        slots: of its placement; None is unlimited.
        running: ids of the runs that hold a slot.
        ahead: ids of the queued runs that get a slot earlier.
    """

    slots: int | None = None
    running: tuple[str, ...] = ()
    ahead: tuple[str, ...] = ()

    @property
    def can_start(self) -> bool:
        return self.slots is None or len(self.running) + len(self.ahead) < self.slots

    def __str__(self) -> str:
        ahead = f", {len(self.ahead)} ahead in the queue" if self.ahead else ""
        return f"{len(self.running)} of {self.slots} slots are taken{ahead}"


def find_position(session: Session, placements: Placements, run: Run) -> QueuePosition:
    return find_new_position(session, placements, placements.readable_template(run.id), run.id)


def retry_pause_left(placements: Placements, run: Run) -> float:
    """Return the seconds until a queued run may be tried again.

    0 if they exceed the longest possible pause, because then the wall clock was set back.
    """
    left = run.not_before - time.time()
    longest = placements.retry_policy(run.id).max_delay(run.current_epoch - 1)
    return left if 0.0 < left <= longest else 0.0


def find_new_position(
    session: Session, placements: Placements, template: Template | None, run_id: str = LAST_ID
) -> QueuePosition:
    """Return the position of a run with this template, by default of one that is submitted now."""
    if template is None or template.slots is None:
        return QueuePosition()
    live = select(Run).where(
        Run.state.in_((RunState.QUEUED.value, RunState.ACTIVE.value)),
        Run.id.not_in(read_inherited(placements.home).runs),
    )
    running, ahead = [], []
    for run in session.scalars(live):
        other = placements.readable_template(run.id)
        if run.id == run_id or other is None or other.placement != template.placement:
            continue
        if run.state == RunState.ACTIVE:
            running.append(run.id)
        elif (
            run.desired != RunState.CANCELLED
            and not retry_pause_left(placements, run)
            and (-other.priority, run.id) < (-template.priority, run_id)
        ):
            ahead.append(run.id)
    return QueuePosition(template.slots, tuple(running), tuple(ahead))
