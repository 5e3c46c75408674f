"""The fields of a calibrate stage."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from perilune.bundle.plugin import Consumes
from perilune.learn.process_rewards import AnswerValues, ProcessRewardField
from perilune.tasks.stage.sampling import SamplingSpec


class CalibrateSpec(SamplingSpec):
    """Fields of a calibrate stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(
        description="stage whose checkpoint samples and gives the values"
    )
    tasks: int = Field(64, ge=2, description="held-out tasks")
    samples: int = Field(4, ge=1, description="answers per task")
    continuations: int = Field(16, ge=2, description="continuations sampled from each prefix of an answer")
    process_rewards: ProcessRewardField = Field(
        AnswerValues(), description="process rewards to calibrate: `answer`, or a section with that name"
    )
    token_budget: int = Field(4096, ge=1, description="maximum tokens of a forward pass; limits memory")

    @model_validator(mode="after")
    def _check_process_rewards(self) -> CalibrateSpec:
        if self.process_rewards is None or self.process_rewards.name != "answer":
            raise ValueError("calibrate takes process_rewards: answer, or a section with that name")
        return self
