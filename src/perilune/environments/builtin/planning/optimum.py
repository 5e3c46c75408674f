"""The most interesting plan of a trip: by dynamic programming for few places, else by OR-Tools' CP-SAT.

https://developers.google.com/optimization (Apache-2.0). One worker, a fixed seed and a limit on deterministic
time: the same version of OR-Tools returns the same plan on every machine.
"""

from dataclasses import dataclass
from typing import Any

from perilune.environments.builtin.planning.trip import (
    HOME,
    Place,
    Plan,
    Trip,
    Visit,
    find_earliest_visit,
    travel_steps,
)
from perilune.errors import RequestError, WorkFailedError

MAX_ENUMERATED_PLACES = 10  # places; up to this number, all sets of places can be enumerated


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best known plan of a trip.

    Attributes:
        plan: the best plan found; empty if none was found.
        bound: upper bound on the interest of every plan.
    """

    plan: Plan
    interest: int
    bound: int


def find_best_plan(trip: Trip, effort: float) -> Optimum | None:
    """Return the most interesting plan that satisfies every constraint; None if there is no valid plan.

    Args:
        effort: deterministic time for OR-Tools, if it is needed.

    Raises:
        RequestError: if OR-Tools is needed and not installed.
    """
    if len(trip.places) <= MAX_ENUMERATED_PLACES:
        return solve_by_sets(trip)
    return solve_by_cpsat(trip, effort)


_State = tuple[int, int]  # the set of visited places as a bit mask, and the index of the last one


def solve_by_sets(trip: Trip) -> Optimum | None:
    """Return the best plan by dynamic programming over sets of places (Held and Karp 1962), in O(2^n n^2).

    Arriving earlier with the same visited places and the same last place is never worse, because the
    traveller can wait and travel times satisfy the triangle inequality. So the earliest time for each state
    suffices.
    """
    bits = [1 << index for index, _ in enumerate(trip.places)]
    required = sum(bit for bit, place in zip(bits, trip.places, strict=True) if place.must_see)
    layer: dict[_State, tuple[int, int]] = {(0, -1): (1, 0)}
    reached: dict[_State, tuple[_State, Visit]] = {}
    best: tuple[int, _State] | None = None
    while layer:
        following: dict[_State, tuple[int, int]] = {}
        for (visited, last), (day, time) in layer.items():
            if visited & required == required and visited.bit_count() >= trip.visits:
                worth = sum(p.interest for bit, p in zip(bits, trip.places, strict=True) if visited & bit)
                if best is None or worth > best[0]:
                    best = worth, (visited, last)
            money = trip.budget - sum(
                p.price for bit, p in zip(bits, trip.places, strict=True) if visited & bit
            )
            position = HOME if last < 0 else trip.places[last].at
            for index, place in enumerate(trip.places):
                if visited & bits[index] or place.price > money:
                    continue
                visit = find_earliest_visit(trip, place, day, time, position)
                if visit is None:
                    continue
                state, end = (visited | bits[index], index), (visit.day, visit.start + place.stay)
                if end < following.get(state, (trip.days + 1, 0)):
                    following[state] = end
                    reached[state] = ((visited, last), visit)
        layer = following
    if best is None:
        return None
    worth, state = best
    plan: list[Visit] = []
    while state in reached:
        state, visit = reached[state]
        plan.append(visit)
    return Optimum(tuple(reversed(plan)), worth, worth)


def solve_by_cpsat(trip: Trip, effort: float) -> Optimum | None:
    """Return the best plan found and a bound on all plans; None if no valid plan exists.

    Args:
        effort: deterministic time, about seconds.

    Raises:
        RequestError: if OR-Tools is not installed.
        WorkFailedError: if the time did not suffice to find any plan.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise RequestError(
            "more than 10 places need OR-Tools, which is not installed",
            where="environment.places",
            remedy="pip install 'perilune[planning]', or use at most 10 places",
        ) from None
    model = cp_model.CpModel()
    starts = [model.new_int_var(place.opens, place.closes - place.stay, "") for place in trip.places]
    on_day = [[model.new_bool_var("") for _ in trip.places] for _ in range(trip.days)]
    for day, visited in enumerate(on_day, start=1):
        _add_day(model, trip, day, visited, starts)
    chosen = [sum(visited[index] for visited in on_day) for index, _ in enumerate(trip.places)]
    for place, count in zip(trip.places, chosen, strict=True):
        model.add(count == 1 if place.must_see else count <= 1)
    model.add(sum(chosen) >= trip.visits)
    model.add(sum(p.price * count for p, count in zip(trip.places, chosen, strict=True)) <= trip.budget)
    model.maximize(sum(p.interest * count for p, count in zip(trip.places, chosen, strict=True)))

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        what = f"no plan was found in {effort:g} of deterministic time"
        raise WorkFailedError(what, where="environment.effort", remedy="increase effort, or use fewer places")
    plan = [
        Visit(day, solver.value(starts[index]), place.name)
        for day, visited in enumerate(on_day, start=1)
        for index, place in enumerate(trip.places)
        if solver.value(visited[index])
    ]
    plan.sort(key=lambda visit: (visit.day, visit.start))
    return Optimum(tuple(plan), round(solver.objective_value), int(solver.best_objective_bound + 1e-6))


def _add_day(model: Any, trip: Trip, day: int, visited: list[Any], starts: list[Any]) -> None:
    """Add a round trip from home through the places visited on this day. Home is node 0."""
    arcs = [(0, 0, model.new_bool_var(""))]  # no visits on this day
    for index, place in enumerate(trip.places):
        arcs.append((index + 1, index + 1, ~visited[index]))
        _add_hours(model, trip, place, day=day, visited=visited[index], start=starts[index])
        first, last = model.new_bool_var(""), model.new_bool_var("")
        arcs += [(0, index + 1, first), (index + 1, 0, last)]
        for other, next_place in enumerate(trip.places):
            if other == index:
                continue
            follows = model.new_bool_var("")
            arcs.append((index + 1, other + 1, follows))
            model.add(
                starts[other] >= starts[index] + place.stay + travel_steps(place.at, next_place.at)
            ).only_enforce_if(follows)
    model.add_circuit(arcs)


def _add_hours(model: Any, trip: Trip, place: Place, *, day: int, visited: Any, start: Any) -> None:
    """Add the times at which the place can be visited on this day.

    The direct distance from and to home suffices, by the triangle inequality.
    """
    distance = travel_steps(HOME, place.at)
    model.add(start >= distance).only_enforce_if(visited)
    model.add(start + place.stay + distance <= trip.length).only_enforce_if(visited)
    window = place.window
    if window is None:
        return
    if window.day != day:
        model.add(visited == 0)
        return
    model.add(start >= window.first).only_enforce_if(visited)
    model.add(start <= window.last).only_enforce_if(visited)
