"""The fields of a distill stage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from perilune.bundle.plugin import Consumes
from perilune.learn.training_settings import LearnerSettings
from perilune.tasks.stage.retention import Saving
from perilune.tasks.stage.sampling import SamplingSpec


class DistillSpec(Saving, LearnerSettings, SamplingSpec):
    """Fields of a distill stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(description="where the student starts")
    teacher: Annotated[str, Consumes("checkpoint")] = Field(
        description="stage whose checkpoint teaches, frozen"
    )
    system: str = Field(
        "", description="system message that the teacher is shown and the student is not; empty: none"
    )
    loss: Literal["reverse_kl", "reverse_topk", "forward_topk", "gkd"] = Field(
        "reverse_kl", description="reverse_kl (policy gradient), reverse_topk, forward_topk or gkd"
    )
    k: int = Field(16, ge=1, description="tokens of the top-k losses and of the overlap figures")
    beta: float = Field(0.5, ge=0, le=1, description="of gkd: 0 is the forward KL, 1 the reverse KL")
    coefficient: float = Field(1.0, gt=0, description="of the teacher's advantages in reverse_kl")
    task_reward: float = Field(
        0.0, ge=0, description="of the verifier's, centred in the group, beside them; 0 leaves them out"
    )
    data: Annotated[str | None, Consumes("dataset")] = Field(
        None, description="stage whose traces take the place of the student's own in some steps"
    )
    on_policy: float = Field(1.0, ge=0, le=1, description="share of steps on the student's own answers")
    steps: int = Field(100, ge=1, description="optimizer steps")
    prompts: int = Field(32, ge=1, description="tasks a step")
    samples: int = Field(4, ge=1, description="answers a task")
    final_lr: float = Field(0.1, ge=0, le=1, description="last learning rate over peak; 1 is constant")

    @model_validator(mode="after")
    def _fits(self) -> DistillSpec:
        if (self.on_policy < 1) != (self.data is not None):
            raise ValueError("on_policy below 1 needs data, and data needs on_policy below 1")
        if self.loss == "reverse_kl" and self.data is not None:
            raise ValueError("reverse_kl is a policy gradient: it needs the student's own answers alone")
        if self.task_reward and (self.loss != "reverse_kl" or self.samples < 2):
            raise ValueError("task_reward needs loss: reverse_kl, and at least 2 samples to compare")
        return self
