"""Generates trips around a plan, so that a valid plan exists and no solver is needed to find one."""

import random
import string
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from perilune.environments.builtin.planning.trip import HOME, Place, Trip, Visit, Window, travel_steps
from perilune.environments.builtin.planning.trip_settings import TripSettings
from perilune.errors import RequestError

MAX_TRIES = 1000
MAX_DISTANCE, MAX_STAY, MAX_PRICE, MAX_INTEREST = 9, 3, 9, 9  # one digit each


def draw_trip(settings: TripSettings, draw: random.Random) -> tuple[Trip, tuple[Visit, ...]]:
    """Return a trip with the given settings, and the plan around which it was generated.

    Raises:
        RequestError: if so many visits hardly ever fit into so short a day.
    """
    for _ in range(MAX_TRIES):
        places = [_random_place(settings, draw, name) for name in string.ascii_uppercase[: settings.places]]
        planted = _draw_plan(settings, draw, draw.sample(places, settings.visits))
        if planted is not None:
            return _build_trip(settings, draw, places, planted), tuple(planted)
    what = f"{settings.visits} visits hardly ever fit into {settings.days} x {settings.length} steps"
    raise RequestError(what, where="environment.length", remedy="increase length or days, or reduce visits")


def _random_place(settings: TripSettings, draw: random.Random, name: str) -> Place:
    """Return a random place with random opening hours."""
    farthest = min(MAX_DISTANCE, settings.length // 2 - 1)
    x = draw.randint(1, farthest)
    y = draw.randint(0, farthest - x) if settings.map == "plane" else 0
    stay = draw.randint(1, min(MAX_STAY, settings.length - 2 * (x + y)))
    opens = draw.randint(0, settings.length - stay)
    closes = min(settings.length, opens + stay + draw.randint(0, settings.slack))
    price, interest = draw.randint(1, MAX_PRICE), draw.randint(1, MAX_INTEREST)
    return Place(name, (x, y), opens, closes, stay, price, interest)


def _draw_plan(settings: TripSettings, draw: random.Random, chosen: Sequence[Place]) -> list[Visit] | None:
    """Return visits of these places in this order, split into days at random, with random waiting times."""
    cuts = sorted(draw.randint(0, len(chosen)) for _ in range(settings.days - 1))
    plan = []
    for day, (first, last) in enumerate(zip([0, *cuts], [*cuts, len(chosen)], strict=True), start=1):
        today = chosen[first:last]
        ways = [
            travel_steps(here, there)
            for here, there in pairwise([HOME, *(place.at for place in today), HOME])
        ]
        spare = settings.length - sum(ways) - sum(place.stay for place in today)
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


def _build_trip(
    settings: TripSettings, draw: random.Random, places: Sequence[Place], planted: Sequence[Visit]
) -> Trip:
    """Return a trip whose hours, reservations, required places and budget permit the planted plan."""
    by_name = {place.name: place for place in places}
    shuffled = draw.sample(planted, len(planted))
    for order, visit in enumerate(shuffled):
        place = by_name[visit.name]
        end = visit.start + place.stay
        window = Window(visit.day, max(0, visit.start - draw.randint(0, 1)), visit.start + draw.randint(0, 1))
        by_name[visit.name] = replace(
            place,
            opens=max(0, visit.start - draw.randint(0, settings.slack)),
            closes=min(settings.length, end + draw.randint(0, settings.slack)),
            must_see=order < settings.must_see,
            window=window if len(shuffled) - order <= settings.windows else None,
        )
    price = sum(by_name[visit.name].price for visit in planted)
    budget = price + round(settings.budget_slack * price)
    return Trip(settings.days, settings.length, budget, settings.visits, tuple(by_name.values()))
