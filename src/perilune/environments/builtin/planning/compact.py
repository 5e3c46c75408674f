"""Trips and plans in a few characters, for models that read one character at a time.

T16 $09 #2              steps of a day, budget, places to visit; and D2 where there are two days
A3 05-09 2 $5 *7!       where, opening hours, length of a visit, price, interest; "!" must be seen
B7 00-12 1 $3 *2 @04-05 entry between these steps; @2:04-05 on the second day

;A05,B10 is a plan: where to be when. Days are set apart by "/". Before ";" may stand whatever helps.
"""

from __future__ import annotations

import re

from perilune.environments.builtin.planning.trip import HOME, Place, Plan, Trip, Visit, Window, travel

MARK = ";"
_VISIT = re.compile(r"([A-Z])(\d\d)", re.ASCII)
_PLAN = re.compile(r"(?:[A-Z]\d\d(?:,[A-Z]\d\d)*)?", re.ASCII)


def prompt(trip: Trip) -> str:
    """What is asked."""
    days = f" D{trip.days}" if trip.days > 1 else ""
    head = f"T{trip.length:02} ${trip.budget:02} #{trip.visits}{days}"
    return "\n".join([head, *(_row(trip, place) for place in trip.places), ""])


def write(trip: Trip, plan: Plan) -> str:
    """A plan, without working."""
    days = [",".join(f"{v.name}{v.start:02}" for v in plan if v.day == day + 1) for day in range(trip.days)]
    return MARK + "/".join(days).rstrip("/")


def working(trip: Trip, plan: Plan) -> str:
    """How a plan came about: each place as it was told, then way, arrival, begin, end, and the money left.

    `A2 00-20 1 $3+2=02>02-03$17 B5 03-15 2 $4+3=06>06-08$13` goes 2 steps to A, is there at 2, stays until 3,
    and has 17 left; from A it is 3 steps to B.
    """
    told, left = [], trip.budget
    day, time, here = 1, 0, HOME
    for visit in plan:
        place = trip.place(visit.name)
        assert place is not None
        if visit.day != day:
            told.append("/")
            day, time, here = visit.day, 0, HOME
        way, end = travel(here, place.at), visit.start + place.stay
        left -= place.price
        told.append(f"{_facts(trip, place)}+{way}={time + way:02}>{visit.start:02}-{end:02}${left:02}")
        time, here = end, place.at
    return " ".join(told)


def read(text: str) -> Plan | None:
    """The plan after the one mark there is; None when there is none, or it is malformed.

    Blanks and line ends after it are overlooked.
    """
    if text.count(MARK) != 1:
        return None
    days = text.partition(MARK)[2].rstrip(" \n").split("/")
    if not all(_PLAN.fullmatch(today) for today in days):
        return None
    return [
        Visit(day, int(found[2]), found[1])
        for day, today in enumerate(days, start=1)
        for found in _VISIT.finditer(today)
    ]


def _row(trip: Trip, place: Place) -> str:
    row = f"{_facts(trip, place)} *{place.interest}{'!' if place.must_see else ''}"
    return row if place.window is None else f"{row} {_reserved(trip, place.window)}"


def _facts(trip: Trip, place: Place) -> str:
    """Where, when, how long and for how much."""
    x, y = place.at
    where = str(x) if all(one.at[1] == 0 for one in trip.places) else f"{x},{y}"
    return f"{place.name}{where} {place.opens:02}-{place.closes:02} {place.stay} ${place.price}"


def _reserved(trip: Trip, window: Window) -> str:
    day = f"{window.day}:" if trip.days > 1 else ""
    return f"@{day}{window.first:02}-{window.last:02}"
