"""Trips drawn around a plan, so that there is one that works; no solver is needed for that."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from perilune.environments.builtin.planning.trip import HOME, Place, Trip, Visit, Window, travel
from perilune.environments.builtin.planning.trip_settings import TripDials
from perilune.errors import RequestError

MOST_TRIES = 1000
FARTHEST, LONGEST_STAY, DEAREST, DEAREST_TO_HEART = 9, 3, 9, 9  # so that each is one digit


def draw_trip(dials: TripDials, draw: random.Random) -> tuple[Trip, tuple[Visit, ...]]:
    """A trip with the settings of `dials`, and the plan that it was drawn around.

    Raises:
        RequestError: when so many visits hardly ever fit into so short a day.
    """
    for _ in range(MOST_TRIES):
        places = [_somewhere(dials, draw, name) for name in string.ascii_uppercase[: dials.places]]
        planted = _plan(dials, draw, draw.sample(places, dials.visits))
        if planted is not None:
            return _around(dials, draw, places, planted), tuple(planted)
    raise RequestError(
        f"{dials.visits} visits hardly ever fit into {dials.days} x {dials.length} steps",
        where="environment.length",
        remedy="more steps a day, more days, or fewer visits",
    )


def _somewhere(dials: TripDials, draw: random.Random, name: str) -> Place:
    """A place at random, open at some time."""
    farthest = min(FARTHEST, dials.length // 2 - 1)
    x = draw.randint(1, farthest)
    y = draw.randint(0, farthest - x) if dials.map == "plane" else 0
    stay = draw.randint(1, min(LONGEST_STAY, dials.length - 2 * (x + y)))
    opens = draw.randint(0, dials.length - stay)
    closes = min(dials.length, opens + stay + draw.randint(0, dials.slack))
    return Place(
        name, (x, y), opens, closes, stay, draw.randint(1, DEAREST), draw.randint(1, DEAREST_TO_HEART)
    )


def _plan(dials: TripDials, draw: random.Random, chosen: Sequence[Place]) -> list[Visit] | None:
    """Visits of these places in this order, cut into days at random, with waiting here and there."""
    cuts = sorted(draw.randint(0, len(chosen)) for _ in range(dials.days - 1))
    plan = []
    for day, (first, last) in enumerate(zip([0, *cuts], [*cuts, len(chosen)], strict=True), start=1):
        today = chosen[first:last]
        ways = [travel(here, there) for here, there in pairwise([HOME, *(place.at for place in today), HOME])]
        spare = dials.length - sum(ways) - sum(place.stay for place in today)
        if today and spare < 0:
            return None
        time = 0
        for way, place in zip(ways, today, strict=False):
            wait = draw.randint(0, spare)
            spare -= wait
            start = time + way + wait
            plan.append(Visit(day, start, place.name))
            time = start + place.stay
    return plan


def _around(dials: TripDials, draw: random.Random, places: Sequence[Place], planted: Sequence[Visit]) -> Trip:
    """The trip on which the planted plan works: hours, reservations, duties and the budget allow it."""
    by_name = {place.name: place for place in places}
    named = draw.sample(planted, len(planted))
    for order, visit in enumerate(named):
        found = by_name[visit.name]
        end = visit.start + found.stay
        window = Window(visit.day, max(0, visit.start - draw.randint(0, 1)), visit.start + draw.randint(0, 1))
        by_name[visit.name] = replace(
            found,
            opens=max(0, visit.start - draw.randint(0, dials.slack)),
            closes=min(dials.length, end + draw.randint(0, dials.slack)),
            must_see=order < dials.must_see,
            window=window if len(named) - order <= dials.windows else None,
        )
    price = sum(by_name[visit.name].price for visit in planted)
    budget = price + round(dials.budget_slack * price)
    return Trip(dials.days, dials.length, budget, dials.visits, tuple(by_name.values()))
