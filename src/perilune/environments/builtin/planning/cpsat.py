"""The most interesting plan by a constraint solver: OR-Tools' CP-SAT, with circuits of optional places.

https://developers.google.com/optimization (Apache-2.0). One worker, a fixed seed and a limit on deterministic
time: the same version of OR-Tools gives the same plan on every machine.
"""

from __future__ import annotations

from typing import Any

from perilune.environments.builtin.planning.optimum import Optimum
from perilune.environments.builtin.planning.trip import HOME, Place, Trip, Visit, travel
from perilune.errors import RequestError, WorkFailedError


def by_cpsat(trip: Trip, effort: float) -> Optimum | None:
    """The best plan found, and a bound on all; None where it is proven that there is no plan.

    Args:
        effort: deterministic time, about seconds.

    Raises:
        RequestError: when OR-Tools is not installed.
        WorkFailedError: when the time was not enough to find any plan.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise RequestError(
            "OR-Tools finds the best plan of a trip, and is not installed",
            where="environment.places",
            remedy="pip install 'perilune[planning]', or at most 10 places",
        ) from None
    model = cp_model.CpModel()
    starts = [model.new_int_var(place.opens, place.closes - place.stay, "") for place in trip.places]
    on_day = [[model.new_bool_var("") for _ in trip.places] for _ in range(trip.days)]
    for day, visited in enumerate(on_day, start=1):
        _add_day(model, trip, day, visited, starts)
    chosen = [sum(visited[index] for visited in on_day) for index, _ in enumerate(trip.places)]
    for place, often in zip(trip.places, chosen, strict=True):
        model.add(often == 1 if place.must_see else often <= 1)
    model.add(sum(chosen) >= trip.visits)
    model.add(sum(p.price * often for p, often in zip(trip.places, chosen, strict=True)) <= trip.budget)
    model.maximize(sum(p.interest * often for p, often in zip(trip.places, chosen, strict=True)))

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise WorkFailedError(
            f"no plan was found in {effort:g} of deterministic time",
            where="environment.effort",
            remedy="more effort, or fewer places",
        )
    plan = [
        Visit(day, solver.value(starts[index]), place.name)
        for day, visited in enumerate(on_day, start=1)
        for index, place in enumerate(trip.places)
        if solver.value(visited[index])
    ]
    plan.sort(key=lambda visit: (visit.day, visit.start))
    return Optimum(tuple(plan), round(solver.objective_value), int(solver.best_objective_bound + 1e-6))


def _add_day(model: Any, trip: Trip, day: int, visited: list[Any], starts: list[Any]) -> None:
    """A round trip from home through the places that are visited on this day; home is node 0."""
    arcs = [(0, 0, model.new_bool_var(""))]  # nowhere to go on this day
    for index, place in enumerate(trip.places):
        arcs.append((index + 1, index + 1, ~visited[index]))
        _add_hours(model, trip, place, day=day, visited=visited[index], start=starts[index])
        first, last = model.new_bool_var(""), model.new_bool_var("")
        arcs += [(0, index + 1, first), (index + 1, 0, last)]
        for other, after in enumerate(trip.places):
            if other == index:
                continue
            then = model.new_bool_var("")
            arcs.append((index + 1, other + 1, then))
            model.add(
                starts[other] >= starts[index] + place.stay + travel(place.at, after.at)
            ).only_enforce_if(then)
    model.add_circuit(arcs)


def _add_hours(model: Any, trip: Trip, place: Place, *, day: int, visited: Any, start: Any) -> None:
    """When the place can be visited on this day; by the triangle inequality home is as near as it looks."""
    way = travel(HOME, place.at)
    model.add(start >= way).only_enforce_if(visited)
    model.add(start + place.stay + way <= trip.length).only_enforce_if(visited)
    window = place.window
    if window is None:
        return
    if window.day != day:
        model.add(visited == 0)
        return
    model.add(start >= window.first).only_enforce_if(visited)
    model.add(start <= window.last).only_enforce_if(visited)
