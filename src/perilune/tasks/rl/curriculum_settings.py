"""The settings of a curriculum by pass rate (`perilune.tasks.rl.curriculum`)."""

from typing import Literal

from pydantic import Field

from perilune.frozen import Frozen


class CurriculumSettings(Frozen):
    """The draw of tasks by their pass rates."""

    by: Literal["difficulty", "environment", "task"] = Field(
        "difficulty",
        description="tasks that share an estimated pass rate. difficulty: those of an environment with"
        " the same difficulty; environment: all of an environment, or of a part of a mixture;"
        " task: none, since each task has its own",
    )
    candidates: int = Field(
        4, ge=2, le=64, description="number of candidate tasks for each task that a step draws"
    )
    floor: float = Field(
        0.1,
        gt=0,
        le=1,
        description="lowest weight of a task in the draw, when all its answers are right or all are"
        " wrong. The highest is 1, so a floor of 1 draws uniformly",
    )
    prior: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="the prior of each pass rate is Beta(prior, prior)"
    )
    decay: float = Field(
        0.9, gt=0, le=1, description="factor by which each step multiplies the counts of earlier answers"
    )
    importance_weight: bool = Field(
        False,
        description="weight each group by the inverse of its probability in the draw, which restores the"
        " objective of uniform draws",
    )

    def describe(self) -> str:
        objective = "uniform objective" if self.importance_weight else "objective follows the draw"
        return f"by {self.by}, 1 of {self.candidates} tasks drawn by pass rate; {objective}"
