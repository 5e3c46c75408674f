"""Trips as tasks: generates them, solves each once, and scores plans."""

import itertools
import random
from collections.abc import Iterator
from types import ModuleType

from perilune.environments.builtin.planning import compact, words
from perilune.environments.builtin.planning.constraints import TERMS, interest, judge
from perilune.environments.builtin.planning.draw import draw_trip
from perilune.environments.builtin.planning.optimum import Optimum, best_plan
from perilune.environments.builtin.planning.trip import HOME, Plan, Trip, travel
from perilune.environments.builtin.planning.trip_settings import TripSettings
from perilune.environments.core.protocol import Score, Split, Task
from perilune.environments.core.splits import new_draws
from perilune.files import canonical_json, sha256_bytes

_STYLES: dict[str, ModuleType] = {"compact": compact, "words": words}


def trips(settings: TripSettings, split: Split, seed: int, proposals: int = 1) -> Iterator[Task]:
    """Yield distinct tasks of a split. Each follows from the seed and its index alone.

    Raises:
        RequestError: if the settings permit no trip, or need a solver that is not installed.
        WorkFailedError: if the solver found no plan in its time.
    """
    drawn = (draw_trip(settings, random.Random(f"planning/{seed}/{index}")) for index in itertools.count())
    by_digest = ((trip_digest(trip), (trip, planted)) for trip, planted in drawn)
    for digest, (trip, planted) in new_draws(split, by_digest):
        yield _task(settings, trip, planted, digest, proposals)


def score_plan(task: Task, text: str | None) -> Score:
    """Score an output: each constraint is a term, and the reward is 1 if all hold."""
    trip, style = Trip.from_json(task.data["trip"]), _STYLES[task.data["style"]]
    plan = None if text is None else style.read(text)
    held = judge(trip, plan)
    works = all(held.values())
    quality = interest(trip, plan or ()) / task.data["bound"] if works else 0.0
    strategy = "direct" if text is None or text.startswith(style.MARK) else "worked"
    return Score(
        float(works),
        {name: float(held[name]) for name in TERMS} | {"quality": quality},
        {f"strategy/{strategy}": 1.0, "interest": float(interest(trip, plan or ()))},
    )


def answer(task: Task, plan: Plan, *, worked: bool) -> str:
    """Write a plan as an answer, after its working or directly."""
    trip, style = Trip.from_json(task.data["trip"]), _STYLES[task.data["style"]]
    written: str = style.write(trip, plan)
    return (style.working(trip, plan) if worked else "") + written


def read_answer(task: Task, text: str) -> Plan | None:
    """The plan in a text; None if there is none."""
    plan: Plan | None = _STYLES[task.data["style"]].read(text)
    return plan


def trip_digest(trip: Trip) -> str:
    """SHA-256 of a trip. Names and order of the places do not affect it."""
    raw = trip.to_json()
    unnamed = [{key: value for key, value in place.items() if key != "name"} for place in raw["places"]]
    return sha256_bytes(
        canonical_json({**raw, "places": sorted(canonical_json(one).decode() for one in unnamed)})
    )


def _task(settings: TripSettings, trip: Trip, planted: Plan, digest: str, proposals: int) -> Task:
    style = _STYLES[settings.style]
    best = best_plan(trip, settings.effort)
    assert best is not None, "the planted plan is valid"
    return Task(
        task_id=digest[:32],
        prompt=({"role": "user", "content": style.prompt(trip)},),
        data={
            "trip": trip.to_json(),
            "style": settings.style,
            "actions": [style.write(trip, best.plan)],
            "planted": style.write(trip, planted),
            "interest": best.interest,
            "bound": best.bound,
            "proposals": proposals,
        },
        difficulty=_busy_share(trip, best),
    )


def _busy_share(trip: Trip, best: Optimum) -> float:
    """Share of all steps that the best plan spends on travel and visits."""
    busy = 0
    for day in range(1, trip.days + 1):
        here = HOME
        for visit in best.plan:
            place = trip.place(visit.name)
            if visit.day == day and place is not None:
                busy += travel(here, place.at) + place.stay
                here = place.at
        busy += travel(here, HOME)
    return busy / (trip.days * trip.length)
