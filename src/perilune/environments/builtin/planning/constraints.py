"""The constraints of a plan, each checked by itself, and the interest of a plan."""

from collections.abc import Callable, Mapping
from itertools import groupby, pairwise
from types import MappingProxyType

from perilune.environments.builtin.planning.trip import HOME, Place, Plan, Trip, Visit, travel


def judge(trip: Trip, plan: Plan | None) -> dict[str, bool]:
    """Whether each constraint holds, by name. For None, which is not a plan, none holds.

    A visit of an unknown place violates "known" and is ignored by all other constraints.
    """
    if plan is None:
        return dict.fromkeys(TERMS, False)
    stops = _stops(trip, plan)
    known = len(stops) == len(plan)
    return {"syntax": True, "known": known} | {name: holds(trip, stops) for name, holds in _HOLDS.items()}


def interest(trip: Trip, plan: Plan) -> int:
    """The total interest of a plan's places; each place counts once."""
    return sum(place.interest for place in {place.name: place for _, place in _stops(trip, plan)}.values())


_Stops = list[tuple[Visit, Place]]


def _stops(trip: Trip, plan: Plan) -> _Stops:
    """Visits of known places, sorted by day; visits of one day keep their order."""
    stops = [(visit, place) for visit in plan if (place := trip.place(visit.name)) is not None]
    return sorted(stops, key=lambda stop: stop[0].day)


def _travel(trip: Trip, stops: _Stops) -> bool:
    """Each visit starts after the arrival from home (at the start of a day) or from the previous place."""
    for _, of_day in groupby(stops, key=lambda stop: stop[0].day):
        today = list(of_day)
        visit, place = today[0]
        if visit.start < travel(HOME, place.at):
            return False
        for (before, left), (after, reached) in pairwise(today):
            if after.start < before.start + left.stay + travel(left.at, reached.at):
                return False
    return True


def _hours(trip: Trip, stops: _Stops) -> bool:
    return all(
        place.opens <= visit.start and visit.start + place.stay <= place.closes for visit, place in stops
    )


def _window(trip: Trip, stops: _Stops) -> bool:
    return all(
        window.day == visit.day and window.first <= visit.start <= window.last
        for visit, place in stops
        if (window := place.window) is not None
    )


def _day(trip: Trip, stops: _Stops) -> bool:
    """The plan uses only existing days, and each day ends at home in time."""
    return all(
        1 <= visit.day <= trip.days and visit.start + place.stay + travel(place.at, HOME) <= trip.length
        for visit, place in stops
    )


def _names(stops: _Stops) -> set[str]:
    return {place.name for _, place in stops}


_HOLDS: Mapping[str, Callable[[Trip, _Stops], bool]] = MappingProxyType(
    {
        "once": lambda trip, stops: len(_names(stops)) == len(stops),
        "travel": _travel,
        "hours": _hours,
        "window": _window,
        "day": _day,
        "budget": lambda trip, stops: sum(place.price for _, place in stops) <= trip.budget,
        "must_see": lambda trip, stops: {p.name for p in trip.places if p.must_see} <= _names(stops),
        "visits": lambda trip, stops: len(_names(stops)) >= trip.visits,
    }
)
TERMS = ("syntax", "known", *_HOLDS)
"""The text is a plan; all places exist; none is visited twice; travel times, opening hours and reserved
entries hold; each day exists and ends at home in time; the budget suffices; all required places, and enough
places, are visited."""
