"""The queue of a placement with slots: by priority, then in the order of submission."""

import time
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from perilune.control.record.identity import inherited
from perilune.control.record.store import Run
from perilune.control.record.transitions import RunState
from perilune.control.runs.placements import Placements
from perilune.control.runs.templates import Template

LAST = "~"  # sorts after every run id


@dataclass(frozen=True, slots=True)
class Turn:
    """The position of a queued run.

    Attributes:
        slots: of its placement; None is unlimited.
        taking: ids of the runs that hold a slot.
        before: ids of the queued runs that get a slot earlier.
    """

    slots: int | None = None
    taking: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    @property
    def has_come(self) -> bool:
        """Whether the run may start."""
        return self.slots is None or len(self.taking) + len(self.before) < self.slots

    def __str__(self) -> str:
        ahead = f", {len(self.before)} ahead in the queue" if self.before else ""
        return f"{len(self.taking)} of {self.slots} slots are taken{ahead}"


def turn_of(session: Session, placements: Placements, run: Run) -> Turn:
    """The position of a queued run, in the caller's transaction."""
    slots, priority = placements.turn(run.id)
    return _turn(session, placements, slots, placements.place(run.id), (-priority, run.id))


def pause_left(placements: Placements, run: Run) -> float:
    """Seconds until a queued run may be tried again.

    0 if they exceed the longest possible pause, because then the wall clock was set back.
    """
    left = run.not_before - time.time()
    longest = placements.policy_of(run.id).longest(run.current_epoch - 1)
    return left if 0.0 < left <= longest else 0.0


def turn_ahead(session: Session, placements: Placements, template: Template | None) -> Turn:
    """The position that a run submitted now with this template would get."""
    if template is None:
        return Turn()
    return _turn(session, placements, template.slots, template.placement, (-template.priority, LAST))


def _turn(
    session: Session, placements: Placements, slots: int | None, place: object, mine: tuple[int, str]
) -> Turn:
    if slots is None:
        return Turn()
    live = select(Run).where(
        Run.state.in_((RunState.QUEUED.value, RunState.ACTIVE.value)),
        Run.id.not_in(inherited(placements.home).runs),
    )
    here = [one for one in session.scalars(live) if one.id != mine[1] and placements.place(one.id) == place]
    taking = [one.id for one in here if one.state == RunState.ACTIVE]
    waiting = [
        one
        for one in here
        if one.state == RunState.QUEUED
        and one.desired != RunState.CANCELLED
        and not pause_left(placements, one)
    ]
    return Turn(slots, tuple(taking), tuple(one.id for one in waiting if _rank(placements, one) < mine))


def _rank(placements: Placements, run: Run) -> tuple[int, str]:
    return -placements.turn(run.id)[1], run.id
