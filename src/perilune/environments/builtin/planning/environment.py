"""Trips to plan: one plan is asked for, and every constraint is a reward term."""

from __future__ import annotations

from collections.abc import Iterator

from perilune.environments.builtin.planning.second_opinion import works
from perilune.environments.builtin.planning.tasks import trips, verdict
from perilune.environments.builtin.planning.trip_settings import PlanningSpec
from perilune.environments.core.protocol import Score, Split, Task, Transcript
from perilune.environments.core.single_turn import SingleTurn


class PlanningEnvironment(SingleTurn):
    """Reward 1 for a plan that keeps to every constraint.

    Each constraint is a term of its own, 1 or 0. The term "quality", the interest of the plan as a share of
    the best plan's, is 0 where the plan does not work, and no part of the reward.
    """

    Spec = PlanningSpec

    def __init__(self, spec: PlanningSpec) -> None:
        self.spec = spec
        self.id = "planning"

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Trips without end, as long as there are new ones."""
        return trips(self.spec, split, seed)

    def score(self, task: Task, transcript: Transcript) -> Score:
        """Judge a plan; what the token limit cut off is none."""
        return verdict(task, transcript.text if transcript.finished else None)

    def gold(self, task: Task) -> Transcript:
        """The most interesting plan, or the best that was found."""
        return Transcript(task.data["actions"][-1])

    def is_right(self, task: Task, transcript: Transcript) -> bool:
        """A second opinion, for audits: goes through the days step by step, in code of its own."""
        return transcript.finished and works(task.data["trip"], task.data["style"], transcript.text)
