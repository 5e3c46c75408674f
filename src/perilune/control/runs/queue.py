"""Whose turn it is: a placement with slots begins runs by priority, then in the order of submission."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from perilune.control.record.identity import inherited
from perilune.control.record.store import Run
from perilune.control.record.transitions import RunState
from perilune.control.runs.placements import Placements
from perilune.control.runs.templates import Template

LAST = "~"  # comes after every run's id


@dataclass(frozen=True, slots=True)
class Turn:
    """Where a queued run stands.

    Attributes:
        slots: of its placement; None is any number.
        taking: runs that have one, by id.
        before: runs that are given one sooner, by id.
    """

    slots: int | None = None
    taking: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    @property
    def has_come(self) -> bool:
        """Whether it may begin."""
        return self.slots is None or len(self.taking) + len(self.before) < self.slots

    def __str__(self) -> str:
        ahead = f", and {len(self.before)} go before it" if self.before else ""
        return f"{len(self.taking)} of {self.slots} slots are taken{ahead}"


def turn_of(session: Session, placements: Placements, run: Run) -> Turn:
    """Where a queued run stands, in the caller's transaction."""
    slots, priority = placements.turn(run.id)
    return _turn(session, placements, slots, placements.place(run.id), (-priority, run.id))


def pause_left(placements: Placements, run: Run) -> float:
    """Seconds that a queued run still waits before it is tried again.

    None when they are more than were ever to be waited: the wall clock has been set back since.
    """
    left = run.not_before - time.time()
    longest = placements.policy_of(run.id).longest(run.current_epoch - 1)
    return left if 0.0 < left <= longest else 0.0


def turn_ahead(session: Session, placements: Placements, template: Template | None) -> Turn:
    """Where a run would stand that was submitted now with that template."""
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
