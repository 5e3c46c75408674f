"""The planning teacher: writes the best plan of a trip, directly, with working, or as a repair."""

from collections.abc import Sequence
from typing import ClassVar

from perilune.data.generators.scripted import ScriptedTeacher
from perilune.environments.builtin.planning.constraints import check_plan
from perilune.environments.builtin.planning.tasks import read_answer, write_answer
from perilune.environments.builtin.planning.trip import HOME, Plan, Trip, Visit, travel_steps
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import Task
from perilune.errors import RequestError


class PlanningTeacher(ScriptedTeacher):
    """Writes the best plan, which a solver found.

    * worked: every visit with travel, arrival, start, end and the remaining budget; then the plan,
    * direct: the plan at once,
    * mended: first a hasty plan that takes the places by opening time; after the environment has listed its
      problems, the worked plan. For the environment `planning_repair`. A hasty plan without problems is
      final.
    """

    name = "planning"
    strategies: ClassVar = {"worked": 1.0, "direct": 0.0, "mended": 0.0}
    supports = ("planted", "the planning environments")

    def script(self, task: Task, strategy: str, chance: KeyedRandom) -> Sequence[str]:
        """Return the proposals.

        Raises:
            RequestError: when mended is used with a single proposal.
        """
        best = read_answer(task, task.data["actions"][-1])
        assert best is not None
        written = write_answer(task, best, worked=strategy != "direct")
        if strategy != "mended":
            return (written,)
        if task.data["proposals"] == 1:
            what = "the strategy mended needs an environment with several proposals"
            raise RequestError(what, where="strategies.mended", remedy="use the environment planning_repair")
        trip = Trip.from_json(task.data["trip"])
        hasty = make_hasty_plan(trip)
        first = write_answer(task, hasty, worked=True)
        return (first,) if all(check_plan(trip, hasty).values()) else (first, written)


def make_hasty_plan(trip: Trip) -> Plan:
    """Return the required number of places by opening time, all on the first day."""
    plan: list[Visit] = []
    time, position = 0, HOME
    for place in sorted(trip.places, key=lambda p: p.opens)[: trip.visits]:
        start = max(time + travel_steps(position, place.at), place.opens)
        plan.append(Visit(1, start, place.name))
        time, position = start + place.stay, place.at
    return plan
