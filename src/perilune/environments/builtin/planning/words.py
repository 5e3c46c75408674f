"""Trips and plans in English. A step is half an hour, and days start at nine."""

import re

from perilune.environments.builtin.planning.trip import HOME, Place, Plan, Trip, Visit, travel_steps

ANSWER_MARK = "PLAN"
_DAY_START_MINUTES = 9 * 60
_STEP_MINUTES = 30  # minutes
_PLACES = """
aquarium bakery castle dairy exchange florist gallery harbour icehouse jeweller kiosk library museum nursery
observatory park quarry racecourse stadium theatre university vineyard windmill xylotheque yard zoo
"""
_NAMES = tuple(_PLACES.split())
_VISIT = re.compile(r"(\d) (\d\d):(\d\d) ([a-z]+)", re.ASCII)


def render_prompt(trip: Trip) -> str:
    days = "one day" if trip.days == 1 else f"{trip.days} days"
    places = "one place" if trip.visits == 1 else f"{trip.visits} places"
    return "\n".join(
        [
            f"Plan a trip of {days}. A day begins at home at {_format_time(0)} and ends at home, by"
            f" {_format_time(trip.length)} at the latest. Home is at (0, 0). From (a, b) to (c, d) it takes"
            " |a - c| + |b - d| times half an hour. You may wait. The places:",
            *(_render_place(place) for place in trip.places),
            f"Visit at least {places}, none of them twice, and everything that must"
            " be seen. A visit begins and ends within the opening hours. Spend at most"
            f" {trip.budget} in all. Among such plans, the more interest in total the better.",
            f"You may think first. Then write a line that says {ANSWER_MARK}, and after it one line for each"
            " visit, in order, with day, time of entry and place: 1"
            f" {_format_time(3)} {_place_name(trip.places[0].name)}",
        ]
    )


def write_plan(trip: Trip, plan: Plan) -> str:
    return "\n".join([ANSWER_MARK, *(f"{v.day} {_format_time(v.start)} {_place_name(v.name)}" for v in plan)])


def write_working(trip: Trip, plan: Plan) -> str:
    """Return the working of a plan, one sentence per visit."""
    sentences, money = [], trip.budget
    day, time, position = 1, 0, HOME
    for visit in plan:
        place = trip.find_place(visit.name)
        assert place is not None
        if visit.day != day:
            day, time, position = visit.day, 0, HOME
        arrival, end = time + travel_steps(position, place.at), visit.start + place.stay
        money -= place.price
        sentences.append(
            f"Day {day}: to the {_place_name(place.name)} by {_format_time(arrival)}, in at"
            f" {_format_time(visit.start)}, out at {_format_time(end)}, {money} left."
        )
        time, position = end, place.at
    return "\n".join([*sentences, ""])


def read_plan(text: str) -> Plan | None:
    """Return the plan after the only line PLAN; None if there are several or none, or it is malformed.

    Trailing spaces and line ends are ignored. A name that is not in the list stays as it is, and its place is
    unknown.
    """
    lines = text.rstrip(" \n").split("\n")
    if lines.count(ANSWER_MARK) != 1:
        return None
    visits = []
    for line in lines[lines.index(ANSWER_MARK) + 1 :]:
        match = _VISIT.fullmatch(line)
        step, remainder = (
            divmod(int(match[2]) * 60 + int(match[3]) - _DAY_START_MINUTES, _STEP_MINUTES)
            if match
            else (-1, 0)
        )
        if match is None or int(match[3]) >= 60 or remainder or step < 0:
            return None
        visits.append(Visit(int(match[1]), step, _place_letter(match[4])))
    return visits


def _render_place(place: Place) -> str:
    facts = [
        f"- {_place_name(place.name)} at ({place.at[0]}, {place.at[1]}): open from"
        f" {_format_time(place.opens)} to {_format_time(place.closes)}, a visit takes"
        f" {place.stay * _STEP_MINUTES} minutes and costs {place.price}, interest {place.interest}"
    ]
    if place.must_see:
        facts.append("must be seen")
    if place.window:
        first, last = _format_time(place.window.first), _format_time(place.window.last)
        facts.append(f"if visited, then on day {place.window.day} with entry from {first} to {last}")
    return ", ".join(facts)


def _format_time(step: int) -> str:
    hour, minute = divmod(_DAY_START_MINUTES + step * _STEP_MINUTES, 60)
    return f"{hour:02}:{minute:02}"


def _place_name(letter: str) -> str:
    return _NAMES[ord(letter) - ord("A")]


def _place_letter(name: str) -> str:
    return chr(ord("A") + _NAMES.index(name)) if name in _NAMES else name
