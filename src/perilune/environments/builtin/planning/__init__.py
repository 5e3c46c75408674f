"""Trips to plan under hard constraints. Each trip is generated with a valid plan and scored constraint by
constraint.
"""

from perilune.environments.builtin.planning.environment import PlanningEnvironment, PlanningRepairEnvironment

__all__ = ["PlanningEnvironment", "PlanningRepairEnvironment"]
