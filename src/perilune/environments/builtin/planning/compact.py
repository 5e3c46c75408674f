"""Trips and plans in a few characters, for character-level models.

T16 $09 #2              steps per day, budget, places to visit; and D2 if there are two days
A3 05-09 2 $5 *7!       position, opening hours, length of a visit, price, interest; "!": must be visited
B7 00-12 1 $3 *2 @04-05 entry between these steps; @2:04-05 on the second day

;A05,B10 is a plan: place and time of each visit. "/" separates days. Any text may precede ";".
"""

import re

from perilune.environments.builtin.planning.trip import HOME, Place, Plan, Trip, Visit, Window, travel_steps

ANSWER_MARK = ";"
_VISIT = re.compile(r"([A-Z])(\d\d)", re.ASCII)
_PLAN = re.compile(r"(?:[A-Z]\d\d(?:,[A-Z]\d\d)*)?", re.ASCII)


def render_prompt(trip: Trip) -> str:
    days = f" D{trip.days}" if trip.days > 1 else ""
    head = f"T{trip.length:02} ${trip.budget:02} #{trip.visits}{days}"
    return "\n".join([head, *(_render_place(trip, place) for place in trip.places), ""])


def write_plan(trip: Trip, plan: Plan) -> str:
    days = [",".join(f"{v.name}{v.start:02}" for v in plan if v.day == day + 1) for day in range(trip.days)]
    return ANSWER_MARK + "/".join(days).rstrip("/")


def write_working(trip: Trip, plan: Plan) -> str:
    """Write the facts of each place, then travel time, arrival, start, end and the remaining money.

    `A2 00-20 1 $3+2=02>02-03$17 B5 03-15 2 $4+3=06>06-08$13` travels 2 steps to A, arrives at 2, stays until
    3 and has 17 left; from A to B it takes 3 steps.
    """
    steps, money = [], trip.budget
    day, time, position = 1, 0, HOME
    for visit in plan:
        place = trip.find_place(visit.name)
        assert place is not None
        if visit.day != day:
            steps.append("/")
            day, time, position = visit.day, 0, HOME
        distance, end = travel_steps(position, place.at), visit.start + place.stay
        money -= place.price
        arrival = time + distance
        steps.append(
            f"{_render_facts(trip, place)}+{distance}={arrival:02}>{visit.start:02}-{end:02}${money:02}"
        )
        time, position = end, place.at
    return " ".join(steps)


def read_plan(text: str) -> Plan | None:
    """Return the plan after the only mark; None if there is no single mark or the plan is malformed.

    Trailing spaces and line ends are ignored.
    """
    if text.count(ANSWER_MARK) != 1:
        return None
    days = text.partition(ANSWER_MARK)[2].rstrip(" \n").split("/")
    if not all(_PLAN.fullmatch(today) for today in days):
        return None
    return [
        Visit(day, int(match[2]), match[1])
        for day, today in enumerate(days, start=1)
        for match in _VISIT.finditer(today)
    ]


def _render_place(trip: Trip, place: Place) -> str:
    row = f"{_render_facts(trip, place)} *{place.interest}{'!' if place.must_see else ''}"
    return row if place.window is None else f"{row} {_render_window(trip, place.window)}"


def _render_facts(trip: Trip, place: Place) -> str:
    """Render position, opening hours, length of a visit and price."""
    x, y = place.at
    position = str(x) if all(other.at[1] == 0 for other in trip.places) else f"{x},{y}"
    return f"{place.name}{position} {place.opens:02}-{place.closes:02} {place.stay} ${place.price}"


def _render_window(trip: Trip, window: Window) -> str:
    day = f"{window.day}:" if trip.days > 1 else ""
    return f"@{day}{window.first:02}-{window.last:02}"
