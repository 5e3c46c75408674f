"""The planner: states the best plan of a trip, with its working or without, or mends a hasty one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from perilune.data.generators.scripted import ScriptedTeacher
from perilune.environments.builtin.planning.constraints import judge
from perilune.environments.builtin.planning.tasks import answer, read_answer
from perilune.environments.builtin.planning.trip import HOME, Plan, Trip, Visit, travel
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import Task
from perilune.errors import RequestError


class PlanningTeacher(ScriptedTeacher):
    """Writes the plan that a solver found best.

    * worked: every visit with the way there, arrival, begin, end and the money left; then the plan,
    * direct: the plan at once,
    * mended: first a hasty plan, which takes whatever opens first, and once told what is wrong with it the
      worked one; for the environment `planning_repair`. Where haste does no harm the hasty plan is all.
    """

    name = "planning"
    strategies: ClassVar = {"worked": 1.0, "direct": 0.0, "mended": 0.0}

    def script(self, task: Task, strategy: str, chance: KeyedRandom) -> Sequence[str]:
        """The proposals.

        Raises:
            RequestError: when a task is of another environment, or of one turn, where nothing is mended.
        """
        if "planted" not in task.data:
            raise RequestError("the planning teacher knows trips alone", where="teacher")
        best = read_answer(task, task.data["actions"][-1])
        assert best is not None
        written = answer(task, best, worked=strategy != "direct")
        if strategy != "mended":
            return (written,)
        if task.data["proposals"] == 1:
            raise RequestError(
                "a plan is mended where several may be proposed",
                where="strategies.mended",
                remedy="the environment planning_repair",
            )
        trip = Trip.from_json(task.data["trip"])
        hasty = hasty_plan(trip)
        first = answer(task, hasty, worked=True)
        return (first,) if all(judge(trip, hasty).values()) else (first, written)


def hasty_plan(trip: Trip) -> Plan:
    """As many places as have to be visited, in the order in which they open, all on the first day."""
    plan: list[Visit] = []
    time, here = 0, HOME
    for place in sorted(trip.places, key=lambda one: one.opens)[: trip.visits]:
        start = max(time + travel(here, place.at), place.opens)
        plan.append(Visit(1, start, place.name))
        time, here = start + place.stay, place.at
    return plan
