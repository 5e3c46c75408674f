"""The fields of a flywheel stage."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from perilune.bundle.plugin import Consumes
from perilune.learn.training_settings import LearnerSettings
from perilune.tasks.stage.retention import Saving
from perilune.tasks.stage.sampling import SamplingSpec


class FlywheelSpec(Saving, LearnerSettings, SamplingSpec):
    """Fields of a flywheel stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(description="where the policy starts")
    steps: int = Field(4, ge=1, description="rounds, unless it stops gaining before")
    tasks: int = Field(1024, ge=1, description="fresh training tasks a round")
    samples: int = Field(4, ge=1, description="answers a task, of which the likeliest right one is kept")
    updates: int = Field(100, ge=1, description="optimizer steps a round, on the traces of all rounds")
    batch_size: int = Field(64, ge=1, description="traces an optimizer step")
    heldout: int = Field(256, ge=2, description="held-out tasks that each round is judged on")
    save_every: int = Field(1, ge=1, description="rounds between two checkpoints to resume from")
