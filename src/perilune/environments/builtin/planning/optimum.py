"""The most interesting plan of a trip: by dynamic programming where it is small, else by OR-Tools."""

from __future__ import annotations

from dataclasses import dataclass

from perilune.environments.builtin.planning.trip import HOME, Plan, Trip, Visit, earliest

SMALL = 10  # places; up to so many the sets of them can all be looked at


@dataclass(frozen=True, slots=True)
class Optimum:
    """What is known of a trip's best plan.

    Attributes:
        plan: the best that was found; empty where none was.
        interest: of that plan.
        bound: that no plan exceeds.
    """

    plan: Plan
    interest: int
    bound: int

    @property
    def proven(self) -> bool:
        """Whether no plan is better."""
        return self.interest == self.bound


def best_plan(trip: Trip, effort: float) -> Optimum | None:
    """The most interesting plan that keeps to every constraint; None where there is none.

    Args:
        effort: deterministic time of OR-Tools, where it is needed.

    Raises:
        RequestError: when OR-Tools is needed and not installed.
    """
    if len(trip.places) <= SMALL:
        return by_sets(trip)
    from perilune.environments.builtin.planning.cpsat import by_cpsat

    return by_cpsat(trip, effort)


_State = tuple[int, int]  # the set of places visited, as bits, and the last of them


def by_sets(trip: Trip) -> Optimum | None:
    """The best plan by dynamic programming over sets of places (Held and Karp 1962).

    To have visited the same places, and be at the same one, earlier is never worse: one can wait, and ways
    obey the triangle inequality. So of each set and last place the earliest time is enough. O(2^n n^2).
    """
    free = [1 << index for index, _ in enumerate(trip.places)]
    must = sum(bit for bit, place in zip(free, trip.places, strict=True) if place.must_see)
    layer: dict[_State, tuple[int, int]] = {(0, -1): (1, 0)}
    reached: dict[_State, tuple[_State, Visit]] = {}
    best: tuple[int, _State] | None = None
    while layer:
        following: dict[_State, tuple[int, int]] = {}
        for (visited, last), (day, time) in layer.items():
            if visited & must == must and visited.bit_count() >= trip.visits:
                worth = sum(p.interest for bit, p in zip(free, trip.places, strict=True) if visited & bit)
                if best is None or worth > best[0]:
                    best = worth, (visited, last)
            left = trip.budget - sum(
                p.price for bit, p in zip(free, trip.places, strict=True) if visited & bit
            )
            here = HOME if last < 0 else trip.places[last].at
            for index, place in enumerate(trip.places):
                if visited & free[index] or place.price > left:
                    continue
                visit = earliest(trip, place, day, time, here)
                if visit is None:
                    continue
                state, end = (visited | free[index], index), (visit.day, visit.start + place.stay)
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
