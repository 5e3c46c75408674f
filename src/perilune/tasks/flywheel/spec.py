"""The fields of a flywheel stage."""

from typing import Annotated

from pydantic import Field

from perilune.bundle.plugin import Consumes
from perilune.learn.training_settings import LearnerSettings
from perilune.tasks.forgetting.spec import ForgettingSpec
from perilune.tasks.stage.retention import TrainingSpec
from perilune.tasks.stage.sampling import SamplingSpec


class FlywheelSpec(TrainingSpec, LearnerSettings, SamplingSpec, ForgettingSpec):
    """Fields of a flywheel stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(description="checkpoint to start from")
    steps: int = Field(4, ge=1, description="maximum rounds; the stage stops after a round without a gain")
    tasks: int = Field(1024, ge=1, description="new training tasks per round")
    samples: int = Field(4, ge=1, description="answers per task; the most likely right one is kept")
    updates: int = Field(100, ge=1, description="optimizer steps per round, on the traces of all rounds")
    batch_size: int = Field(64, ge=1, description="traces per optimizer step")
    heldout: int = Field(256, ge=2, description="held-out tasks to evaluate each round on")
    save_every: int = Field(1, ge=1, description="rounds between checkpoints to resume from")
