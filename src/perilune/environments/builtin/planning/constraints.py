"""The constraints of a plan, each checked by itself, and the interest of a plan."""

from collections.abc import Callable, Mapping
from itertools import groupby, pairwise
from types import MappingProxyType

from perilune.environments.builtin.planning.trip import HOME, Place, Plan, Trip, Visit, travel_steps


def check_plan(trip: Trip, plan: Plan | None) -> dict[str, bool]:
    """Return whether each constraint holds, by name. None, for a text that is no plan, violates all.

    A visit of an unknown place violates "known" and is ignored by all other constraints.
    """
    if plan is None:
        return dict.fromkeys(TERMS, False)
    stops = _stops(trip, plan)
    known = len(stops) == len(plan)
    return {"syntax": True, "known": known} | {name: check(trip, stops) for name, check in _CHECKS.items()}


def total_interest(trip: Trip, plan: Plan) -> int:
    """Return the total interest of a plan's places; each place counts once."""
    return sum(place.interest for place in {place.name: place for _, place in _stops(trip, plan)}.values())


_Stops = list[tuple[Visit, Place]]


def _stops(trip: Trip, plan: Plan) -> _Stops:
    """Return the visits of known places, sorted by day; visits of one day keep their order."""
    stops = [(visit, place) for visit in plan if (place := trip.find_place(visit.name)) is not None]
    return sorted(stops, key=lambda stop: stop[0].day)


def _check_travel(trip: Trip, stops: _Stops) -> bool:
    """Check that each visit starts after the arrival from home or from the previous place."""
    for _, day_stops in groupby(stops, key=lambda stop: stop[0].day):
        today = list(day_stops)
        visit, place = today[0]
        if visit.start < travel_steps(HOME, place.at):
            return False
        for (before, previous), (after, current) in pairwise(today):
            if after.start < before.start + previous.stay + travel_steps(previous.at, current.at):
                return False
    return True


def _check_hours(trip: Trip, stops: _Stops) -> bool:
    return all(
        place.opens <= visit.start and visit.start + place.stay <= place.closes for visit, place in stops
    )


def _check_window(trip: Trip, stops: _Stops) -> bool:
    return all(
        window.day == visit.day and window.first <= visit.start <= window.last
        for visit, place in stops
        if (window := place.window) is not None
    )


def _check_day(trip: Trip, stops: _Stops) -> bool:
    """Check that the plan uses only existing days, and each day ends at home in time."""
    return all(
        1 <= visit.day <= trip.days and visit.start + place.stay + travel_steps(place.at, HOME) <= trip.length
        for visit, place in stops
    )


def _visited_names(stops: _Stops) -> set[str]:
    return {place.name for _, place in stops}


_CHECKS: Mapping[str, Callable[[Trip, _Stops], bool]] = MappingProxyType(
    {
        "once": lambda trip, stops: len(_visited_names(stops)) == len(stops),
        "travel": _check_travel,
        "hours": _check_hours,
        "window": _check_window,
        "day": _check_day,
        "budget": lambda trip, stops: sum(place.price for _, place in stops) <= trip.budget,
        "must_see": lambda trip, stops: {p.name for p in trip.places if p.must_see} <= _visited_names(stops),
        "visits": lambda trip, stops: len(_visited_names(stops)) >= trip.visits,
    }
)
TERMS = ("syntax", "known", *_CHECKS)
"""The constraints in this order: the text is a plan; all places exist; none is visited twice; travel times,
opening hours and reserved entries hold; each day exists and ends at home in time; the budget suffices; all
required places, and enough places, are visited."""
