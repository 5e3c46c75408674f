"""Trips to plan under hard constraints: drawn with a plan that works, judged constraint by constraint."""

from perilune.environments.builtin.planning.environment import PlanningEnvironment
from perilune.environments.builtin.planning.repair import PlanningRepairEnvironment

__all__ = ["PlanningEnvironment", "PlanningRepairEnvironment"]
