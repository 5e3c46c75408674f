"""Trips to plan in several turns: propose, be told what does not hold, propose again."""

from __future__ import annotations

from collections.abc import Iterator

from perilune.environments.builtin.planning.constraints import TERMS
from perilune.environments.builtin.planning.second_opinion import works
from perilune.environments.builtin.planning.tasks import trips, verdict
from perilune.environments.builtin.planning.trip_settings import PlanningRepairSpec
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn, ask, end_episode
from perilune.environments.core.protocol import Split, Task, Transcript


class PlanningRepairEnvironment(MultiTurn):
    """Reward 1 for a plan that keeps to every constraint, within so many proposals.

    Terms are those of the last proposal. After each that does not work, the constraints it breaks are named.
    """

    Spec = PlanningRepairSpec

    def __init__(self, spec: PlanningRepairSpec) -> None:
        self.spec = spec
        self.id = "planning_repair"
        self.max_turns = spec.proposals

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Trips without end, as long as there are new ones."""
        return trips(self.spec, split, seed, self.spec.proposals)

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        """Proposals, until one works."""
        found = verdict(task, (yield ask()))
        proposals = 1
        while not found.reward and proposals < self.max_turns:
            broken = ",".join(name for name in TERMS if not found.terms[name])
            found = verdict(task, (yield ask(f"?{broken}\n", role="tool")))
            proposals += 1
        yield end_episode(
            found.reward, terms=found.terms, metrics={**found.metrics, "proposals": float(proposals)}
        )

    def gold(self, task: Task) -> Transcript:
        """The most interesting plan at once, or the best that was found."""
        return Transcript(task.data["actions"][-1])

    def is_right(self, task: Task, transcript: Transcript) -> bool:
        """A second opinion, for audits: whether the last proposal works."""
        return transcript.finished and works(task.data["trip"], task.data["style"], transcript.text)
