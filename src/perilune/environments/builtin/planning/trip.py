"""The data of a trip: places with hours and prices, days that start and end at home, and a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

HOME = (0, 0)


@dataclass(frozen=True, slots=True)
class Window:
    """A reserved entry: the visit starts on `day` (from 1) between the steps `first` and `last`."""

    day: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Place:
    """A place to visit. Times are whole steps since the start of a day.

    Attributes:
        name: a letter.
        at: coordinates in steps of travel; home is at (0, 0).
        opens, closes: opening hours, the same every day.
        stay: length of a visit in steps.
        price: price of a visit.
        interest: value of a visit to the traveller.
        must_see: whether a valid plan must include the place.
        window: the reserved entry, if any.
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
    """One visit of a plan. It starts on `day` (from 1) at step `start`."""

    day: int
    start: int
    name: str


Plan = Sequence[Visit]


@dataclass(frozen=True, slots=True)
class Trip:
    """A trip to plan.

    Attributes:
        length: steps per day; each day ends at home.
        budget: for all visits together.
        visits: minimum number of places to visit.
    """

    days: int
    length: int
    budget: int
    visits: int
    places: tuple[Place, ...]

    def find_place(self, name: str) -> Place | None:
        return next((place for place in self.places if place.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """Return the trip as JSON, with lists instead of tuples."""
        raw: dict[str, Any] = _TRIP.dump_python(self, mode="json")
        return raw

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Trip:
        return _TRIP.validate_python(raw)


_TRIP = TypeAdapter(Trip)


def travel_steps(here: tuple[int, int], there: tuple[int, int]) -> int:
    """Return the steps from one place to another: the Manhattan distance."""
    return abs(here[0] - there[0]) + abs(here[1] - there[1])


def find_earliest_visit(trip: Trip, place: Place, day: int, time: int, here: tuple[int, int]) -> Visit | None:
    """Return the earliest visit of `place` from position `here` on `day` at step `time`.

    Later days start at home. None if the place cannot be visited any more.
    """
    window = place.window
    for today in range(day, trip.days + 1):
        arrival = time + travel_steps(here, place.at) if today == day else travel_steps(HOME, place.at)
        start = max(arrival, place.opens, window.first if window else 0)
        in_window = window is None or (window.day == today and start <= window.last)
        end = start + place.stay
        if in_window and end <= place.closes and end + travel_steps(place.at, HOME) <= trip.length:
            return Visit(today, start, place.name)
    return None
