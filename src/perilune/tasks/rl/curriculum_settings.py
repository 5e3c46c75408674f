"""The settings of a curriculum by pass rate (`perilune.tasks.rl.curriculum`)."""

from typing import Literal

from pydantic import Field

from perilune.frozen import Frozen


class CurriculumSettings(Frozen):
    """The draw of tasks by their pass rates."""

    by: Literal["difficulty", "environment", "task"] = Field(
        "difficulty",
        description="estimate one pass rate per environment and difficulty, per environment (a part of a"
        " mixture), or per task",
    )
    candidates: int = Field(4, ge=2, le=64, description="tasks to choose from, for each task of a step")
    floor: float = Field(
        0.1,
        gt=0,
        le=1,
        description="lowest weight of a task, for one whose answers are all alike; 1 draws uniformly",
    )
    prior: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="prior of a pass rate, Beta(prior, prior)"
    )
    decay: float = Field(
        0.9, gt=0, le=1, description="factor by which each step reduces the counts of earlier answers"
    )
    importance_weight: bool = Field(
        False, description="weigh each group by the inverse of its probability: the uniform objective"
    )

    def describe(self) -> str:
        objective = "uniform objective" if self.importance_weight else "objective follows the draw"
        return f"by {self.by}, 1 of {self.candidates} tasks drawn by pass rate; {objective}"
