"""What a trip is: places with their hours and prices, days that begin and end at home, and a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

HOME = (0, 0)


@dataclass(frozen=True, slots=True)
class Window:
    """A reserved entry: the visit begins on `day` (from 1), not before step `first`, nor after `last`."""

    day: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere to go. Times are whole steps after a day's begin.

    Attributes:
        name: a letter.
        at: where it is, in steps of travel along two axes; home is at (0, 0).
        opens, closes: a visit is within these, on any day.
        stay: steps that a visit takes.
        price: of a visit.
        interest: what a visit is worth to the traveller.
        must_see: whether a trip without it is none.
        window: None where nothing is reserved.
    """

    name: str
    at: tuple[int, int]
    opens: int
    closes: int
    stay: int
    price: int
    interest: int
    must_see: bool = False
    window: Window | None = None


@dataclass(frozen=True, slots=True)
class Visit:
    """One visit of a plan: it begins on `day` (from 1) at step `start`."""

    day: int
    start: int
    name: str


Plan = Sequence[Visit]


@dataclass(frozen=True, slots=True)
class Trip:
    """What is to be planned.

    Attributes:
        days: how many there are.
        length: steps of a day, at the end of which one is home again.
        budget: of all visits together.
        visits: the least number of places to visit.
    """

    days: int
    length: int
    budget: int
    visits: int
    places: tuple[Place, ...]

    def place(self, name: str) -> Place | None:
        """The place of that name, if there is one."""
        return next((place for place in self.places if place.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """As `from_json` reads it; lists instead of tuples, as JSON has them."""
        rows = [{**asdict(place), "at": list(place.at)} for place in self.places]
        return {**asdict(self), "places": rows}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Trip:
        """What `to_json` wrote."""
        return cls(**{**raw, "places": tuple(_place(one) for one in raw["places"])})


def travel(here: tuple[int, int], there: tuple[int, int]) -> int:
    """Steps from one place to another: along one axis, then along the other."""
    return abs(here[0] - there[0]) + abs(here[1] - there[1])


def earliest(trip: Trip, place: Place, day: int, time: int, here: tuple[int, int]) -> Visit | None:
    """The first visit of `place` that can be had by who is at `here` on `day` at step `time`.

    Later days begin at home. None when no day is left on which it can be had.
    """
    window = place.window
    for today in range(day, trip.days + 1):
        arrival = time + travel(here, place.at) if today == day else travel(HOME, place.at)
        start = max(arrival, place.opens, window.first if window else 0)
        in_window = window is None or (window.day == today and start <= window.last)
        end = start + place.stay
        if in_window and end <= place.closes and end + travel(place.at, HOME) <= trip.length:
            return Visit(today, start, place.name)
    return None


def _place(raw: Mapping[str, Any]) -> Place:
    window = raw["window"]
    return Place(**{**raw, "at": tuple(raw["at"]), "window": None if window is None else Window(**window)})
