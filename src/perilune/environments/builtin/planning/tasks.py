"""Trips as tasks: generates them, solves each once, and scores plans."""

import itertools
import random
from collections.abc import Iterator
from types import ModuleType

from perilune.environments.builtin.planning import compact, words
from perilune.environments.builtin.planning.constraints import TERMS, check_plan, total_interest
from perilune.environments.builtin.planning.draw import draw_trip
from perilune.environments.builtin.planning.optimum import Optimum, find_best_plan
from perilune.environments.builtin.planning.trip import HOME, Plan, Trip, travel_steps
from perilune.environments.builtin.planning.trip_settings import TripSettings
from perilune.environments.core.protocol import Score, Split, Task
from perilune.environments.core.splits import select_unique
from perilune.files import canonical_json, sha256_bytes

_STYLES: dict[str, ModuleType] = {"compact": compact, "words": words}


def generate_tasks(settings: TripSettings, split: Split, seed: int, proposals: int = 1) -> Iterator[Task]:
    """Yield distinct tasks of a split. Each follows from the seed and its index alone.

    Raises:
        RequestError: if the settings permit no trip, or need a solver that is not installed.
        WorkFailedError: if the solver found no plan in its time.
    """
    drawn = (draw_trip(settings, random.Random(f"planning/{seed}/{index}")) for index in itertools.count())
    by_digest = ((trip_digest(trip), (trip, planted)) for trip, planted in drawn)
    for digest, (trip, planted) in select_unique(split, by_digest):
        yield _make_task(settings, trip, planted, digest, proposals)


def score_plan(task: Task, text: str | None) -> Score:
    """Score an output: each constraint is a term, and the reward is 1 if all hold."""
    trip, style = Trip.from_json(task.data["trip"]), _STYLES[task.data["style"]]
    plan = None if text is None else style.read_plan(text)
    satisfied = check_plan(trip, plan)
    is_valid = all(satisfied.values())
    quality = total_interest(trip, plan or ()) / task.data["bound"] if is_valid else 0.0
    strategy = "direct" if text is None or text.startswith(style.ANSWER_MARK) else "worked"
    return Score(
        float(is_valid),
        {name: float(satisfied[name]) for name in TERMS} | {"quality": quality},
        {f"strategy/{strategy}": 1.0, "interest": float(total_interest(trip, plan or ()))},
    )


def write_answer(task: Task, plan: Plan, *, worked: bool) -> str:
    """Write a plan as an answer, after its working or directly."""
    trip, style = Trip.from_json(task.data["trip"]), _STYLES[task.data["style"]]
    written: str = style.write_plan(trip, plan)
    return (style.write_working(trip, plan) if worked else "") + written


def read_answer(task: Task, text: str) -> Plan | None:
    plan: Plan | None = _STYLES[task.data["style"]].read_plan(text)
    return plan


def trip_digest(trip: Trip) -> str:
    """Return SHA-256 of a trip. Names and order of the places do not affect it."""
    raw = trip.to_json()
    unnamed = [{key: value for key, value in place.items() if key != "name"} for place in raw["places"]]
    return sha256_bytes(
        canonical_json({**raw, "places": sorted(canonical_json(place).decode() for place in unnamed)})
    )


def _make_task(settings: TripSettings, trip: Trip, planted: Plan, digest: str, proposals: int) -> Task:
    style = _STYLES[settings.style]
    best = find_best_plan(trip, settings.effort)
    assert best is not None, "the planted plan is valid"
    return Task(
        task_id=digest[:32],
        prompt=({"role": "user", "content": style.render_prompt(trip)},),
        data={
            "trip": trip.to_json(),
            "style": settings.style,
            "actions": [style.write_plan(trip, best.plan)],
            "planted": style.write_plan(trip, planted),
            "interest": best.interest,
            "bound": best.bound,
            "proposals": proposals,
        },
        difficulty=_compute_busy_share(trip, best),
    )


def _compute_busy_share(trip: Trip, best: Optimum) -> float:
    """Return the share of all steps that the best plan spends on travel and visits."""
    busy = 0
    for day in range(1, trip.days + 1):
        position = HOME
        for visit in best.plan:
            place = trip.find_place(visit.name)
            if visit.day == day and place is not None:
                busy += travel_steps(position, place.at) + place.stay
                position = place.at
        busy += travel_steps(position, HOME)
    return busy / (trip.days * trip.length)
