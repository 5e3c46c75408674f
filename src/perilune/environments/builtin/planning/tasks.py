"""Trips as tasks: drawn lazily, solved once, and what a text is worth on one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from types import ModuleType

from perilune.environments.builtin.planning import compact, words
from perilune.environments.builtin.planning.constraints import TERMS, interest, judge
from perilune.environments.builtin.planning.draw import draw_trip
from perilune.environments.builtin.planning.optimum import Optimum, best_plan
from perilune.environments.builtin.planning.trip import HOME, Plan, Trip, travel
from perilune.environments.builtin.planning.trip_settings import TripDials
from perilune.environments.core.protocol import Score, Split, Task
from perilune.files import canonical_json, sha256_bytes

HELD_OUT_PARTS = 10  # one tenth of all trips is held out
MOST_REPEATS = 1000  # in a row, after which there are no new trips

_STYLES: dict[str, ModuleType] = {"compact": compact, "words": words}


def trips(dials: TripDials, split: Split, seed: int, proposals: int = 1) -> Iterator[Task]:
    """Tasks of a split; the one at each place follows from the seed and the place alone.

    Raises:
        RequestError: when the dials leave no trip, or a solver is needed that is not installed.
        WorkFailedError: when the solver found no plan in the time that it has.
    """
    seen: set[str] = set()
    repeats = 0
    for place in itertools.count():
        trip, planted = draw_trip(dials, random.Random(f"planning/{seed}/{place}"))
        digest = trip_digest(trip)
        held_out = int(digest[:8], 16) % HELD_OUT_PARTS == 0
        if digest not in seen and held_out == (split == "heldout"):
            seen.add(digest)
            repeats = 0
            yield _task(dials, trip, planted, digest, proposals)
        elif (repeats := repeats + 1) == MOST_REPEATS:
            return


def verdict(task: Task, text: str | None) -> Score:
    """What an output is worth: every constraint as a term, and their conjunction as the reward."""
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
    """What a plan is written as, after its working or at once."""
    trip, style = Trip.from_json(task.data["trip"]), _STYLES[task.data["style"]]
    written: str = style.write(trip, plan)
    return (style.working(trip, plan) if worked else "") + written


def read_answer(task: Task, text: str) -> Plan | None:
    """The plan that a text states; None when it states none."""
    found: Plan | None = _STYLES[task.data["style"]].read(text)
    return found


def trip_digest(trip: Trip) -> str:
    """SHA-256 of what is asked. What places are called, and in which order they are told, does not count."""
    raw = trip.to_json()
    unnamed = [{key: value for key, value in place.items() if key != "name"} for place in raw["places"]]
    return sha256_bytes(
        canonical_json({**raw, "places": sorted(canonical_json(one).decode() for one in unnamed)})
    )


def _task(dials: TripDials, trip: Trip, planted: Plan, digest: str, proposals: int) -> Task:
    style = _STYLES[dials.style]
    best = best_plan(trip, dials.effort)
    assert best is not None, "the planted plan works"
    return Task(
        task_id=digest[:32],
        prompt=({"role": "user", "content": style.prompt(trip)},),
        data={
            "trip": trip.to_json(),
            "style": dials.style,
            "actions": [style.write(trip, best.plan)],
            "planted": style.write(trip, planted),
            "interest": best.interest,
            "bound": best.bound,
            "proposals": proposals,
        },
        difficulty=_filled(trip, best),
    )


def _filled(trip: Trip, best: Optimum) -> float:
    """Share of the days' steps that the best plan is under way or on a visit."""
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
