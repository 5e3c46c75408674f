"""Trips to plan under hard constraints: drawn with a plan that works, judged constraint by constraint."""

from perilune.environments.planning.environment import PlanningEnvironment
from perilune.environments.planning.repair import PlanningRepairEnvironment

__all__ = ["PlanningEnvironment", "PlanningRepairEnvironment"]
