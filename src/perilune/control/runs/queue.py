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
        """True if the run may start."""
        return self.slots is None or len(self.running) + len(self.ahead) < self.slots

    def __str__(self) -> str:
        ahead = f", {len(self.ahead)} ahead in the queue" if self.ahead else ""
        return f"{len(self.running)} of {self.slots} slots are taken{ahead}"


def find_position(session: Session, placements: Placements, run: Run) -> QueuePosition:
    slots, priority = placements.queue_settings(run.id)
    return _find_position(session, placements, slots, placements.settings(run.id), (-priority, run.id))


def retry_pause_left(placements: Placements, run: Run) -> float:
    """Return the seconds until a queued run may be tried again.

    0 if they exceed the longest possible pause, because then the wall clock was set back.
    """
    left = run.not_before - time.time()
    longest = placements.retry_policy(run.id).max_delay(run.current_epoch - 1)
    return left if 0.0 < left <= longest else 0.0


def find_new_position(session: Session, placements: Placements, template: Template | None) -> QueuePosition:
    """Return the position that a run submitted now with this template would get."""
    if template is None:
        return QueuePosition()
    return _find_position(
        session, placements, template.slots, template.placement, (-template.priority, LAST_ID)
    )


def _find_position(
    session: Session, placements: Placements, slots: int | None, settings: object, own: tuple[int, str]
) -> QueuePosition:
    if slots is None:
        return QueuePosition()
    live = select(Run).where(
        Run.state.in_((RunState.QUEUED.value, RunState.ACTIVE.value)),
        Run.id.not_in(read_inherited(placements.home).runs),
    )
    here = [
        run for run in session.scalars(live) if run.id != own[1] and placements.settings(run.id) == settings
    ]
    taking = [run.id for run in here if run.state == RunState.ACTIVE]
    waiting = [
        run
        for run in here
        if run.state == RunState.QUEUED
        and run.desired != RunState.CANCELLED
        and not retry_pause_left(placements, run)
    ]
    return QueuePosition(
        slots, tuple(taking), tuple(run.id for run in waiting if _sort_key(placements, run) < own)
    )


def _sort_key(placements: Placements, run: Run) -> tuple[int, str]:
    return -placements.queue_settings(run.id)[1], run.id
