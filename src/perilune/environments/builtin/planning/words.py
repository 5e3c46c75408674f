"""Trips and plans in English. A step is half an hour, and days start at nine."""

import re

from perilune.environments.builtin.planning.trip import HOME, Place, Plan, Trip, Visit, travel

MARK = "PLAN"
_BEGIN = 9 * 60
_STEP = 30  # minutes
_PLACES = """
aquarium bakery castle dairy exchange florist gallery harbour icehouse jeweller kiosk library museum nursery
observatory park quarry racecourse stadium theatre university vineyard windmill xylotheque yard zoo
"""
_NAMES = tuple(_PLACES.split())
_VISIT = re.compile(r"(\d) (\d\d):(\d\d) ([a-z]+)", re.ASCII)


def prompt(trip: Trip) -> str:
    """The prompt of a trip."""
    days = "one day" if trip.days == 1 else f"{trip.days} days"
    return "\n".join(
        [
            f"Plan a trip of {days}. A day begins at home at {_clock(0)} and ends at home, by"
            f" {_clock(trip.length)} at the latest. Home is at (0, 0). From (a, b) to (c, d) it takes"
            " |a - c| + |b - d| times half an hour. You may wait. The places:",
            *(_row(place) for place in trip.places),
            f"Visit at least {_count(trip.visits, 'place')}, none of them twice, and everything that must be"
            " seen. A visit begins and ends within the opening hours. Spend at most"
            f" {trip.budget} in all. Among such plans, the more interest in total the better.",
            f"You may think first. Then write a line that says {MARK}, and after it one line for each visit,"
            f" in order, with day, time of entry and place: 1 {_clock(3)} {_name(trip.places[0].name)}",
        ]
    )


def write(trip: Trip, plan: Plan) -> str:
    """A plan without working."""
    return "\n".join([MARK, *(f"{v.day} {_clock(v.start)} {_name(v.name)}" for v in plan)])


def working(trip: Trip, plan: Plan) -> str:
    """The working of a plan, one sentence per visit."""
    sentences, left = [], trip.budget
    day, time, here = 1, 0, HOME
    for visit in plan:
        place = trip.place(visit.name)
        assert place is not None
        if visit.day != day:
            day, time, here = visit.day, 0, HOME
        arrival, end = time + travel(here, place.at), visit.start + place.stay
        left -= place.price
        sentences.append(
            f"Day {day}: to the {_name(place.name)} by {_clock(arrival)}, in at {_clock(visit.start)},"
            f" out at {_clock(end)}, {left} left."
        )
        time, here = end, place.at
    return "\n".join([*sentences, ""])


def read(text: str) -> Plan | None:
    """The plan after the only line PLAN; None if there is no single such line or the plan is malformed.

    Trailing spaces and line ends are ignored. A name that is not in the list stays as it is, and its place is
    unknown.
    """
    lines = text.rstrip(" \n").split("\n")
    if lines.count(MARK) != 1:
        return None
    visits = []
    for line in lines[lines.index(MARK) + 1 :]:
        found = _VISIT.fullmatch(line)
        step, off = divmod(int(found[2]) * 60 + int(found[3]) - _BEGIN, _STEP) if found else (-1, 0)
        if found is None or int(found[3]) >= 60 or off or step < 0:
            return None
        visits.append(Visit(int(found[1]), step, _letter(found[4])))
    return visits


def _row(place: Place) -> str:
    facts = [
        f"- {_name(place.name)} at ({place.at[0]}, {place.at[1]}): open from {_clock(place.opens)}"
        f" to {_clock(place.closes)}, a visit takes {place.stay * _STEP} minutes and costs {place.price},"
        f" interest {place.interest}"
    ]
    if place.must_see:
        facts.append("must be seen")
    if place.window:
        first, last = _clock(place.window.first), _clock(place.window.last)
        facts.append(f"if visited, then on day {place.window.day} with entry from {first} to {last}")
    return ", ".join(facts)


def _clock(step: int) -> str:
    hour, minute = divmod(_BEGIN + step * _STEP, 60)
    return f"{hour:02}:{minute:02}"


def _name(letter: str) -> str:
    return _NAMES[ord(letter) - ord("A")]


def _letter(name: str) -> str:
    return chr(ord("A") + _NAMES.index(name)) if name in _NAMES else name


def _count(number: int, what: str) -> str:
    return f"one {what}" if number == 1 else f"{number} {what}s"
