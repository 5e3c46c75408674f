"""Trips to plan, in one turn or with corrections (`planning_repair`). Every constraint is a reward term."""

from collections.abc import Iterator

from perilune.environments.builtin.planning.constraints import TERMS
from perilune.environments.builtin.planning.second_opinion import is_valid_plan
from perilune.environments.builtin.planning.tasks import generate_tasks, score_plan
from perilune.environments.builtin.planning.trip_settings import PlanningRepairSpec, PlanningSpec
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn, ask, end_episode
from perilune.environments.core.protocol import Score, Split, Task, Transcript
from perilune.environments.core.single_turn import SingleTurn


class _AuditedPlans:
    """What audits ask of an environment. A gold plan is the first proposal."""

    def gold(self, task: Task) -> Transcript:
        """Return the most interesting plan, or the best one found."""
        return Transcript(task.data["actions"][-1])

    def is_right(self, task: Task, transcript: Transcript) -> bool:
        """Return a second opinion for audits: follows the days step by step, in separate code."""
        return transcript.finished and is_valid_plan(task.data["trip"], task.data["style"], transcript.text)


class PlanningEnvironment(_AuditedPlans, SingleTurn):
    """Reward 1 for a plan that satisfies every constraint.

    Each constraint is a term with the value 1 or 0. The term "quality" is the plan's interest as a share of
    the best plan's, 0 for an invalid plan. It is not part of the reward.
    """

    Spec = PlanningSpec

    def __init__(self, spec: PlanningSpec) -> None:
        self.spec = spec
        self.id = "planning"

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        return generate_tasks(self.spec, split, seed)

    def score(self, task: Task, transcript: Transcript) -> Score:
        """Score a plan. A plan that the token limit cut off is invalid."""
        return score_plan(task, transcript.text if transcript.finished else None)


class PlanningRepairEnvironment(_AuditedPlans, MultiTurn):
    """Reward 1 for a plan that satisfies every constraint, within a number of proposals.

    After an invalid proposal the policy sees the names of the violated constraints. Terms are those of the
    last proposal.
    """

    Spec = PlanningRepairSpec

    def __init__(self, spec: PlanningRepairSpec) -> None:
        self.spec = spec
        self.id = "planning_repair"
        self.max_turns = spec.proposals

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        return generate_tasks(self.spec, split, seed, self.spec.proposals)

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        score = score_plan(task, (yield ask()))
        proposals = 1
        while not score.reward and proposals < self.max_turns:
            violated = ",".join(name for name in TERMS if not score.terms[name])
            score = score_plan(task, (yield ask(f"?{violated}\n", role="tool")))
            proposals += 1
        metrics = {**score.metrics, "proposals": float(proposals)}
        yield end_episode(score.reward, terms=score.terms, metrics=metrics)
