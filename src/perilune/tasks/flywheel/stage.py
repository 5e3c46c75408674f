"""flywheel: rounds of sampling, filtering, training and evaluation while the pass rate rises."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from perilune.bundle.job import Job
from perilune.bundle.plugin import Consumes
from perilune.learn.training_settings import LearnerSettings
from perilune.models.config.decoder_config import DecoderConfig
from perilune.tasks.stage.bounds import MAX_SAMPLES, MAX_TASKS
from perilune.tasks.stage.defaults import ForgettingSpec
from perilune.tasks.stage.memory_plan import (
    CacheSettings,
    StageMemory,
    model_config,
    plan_stage_memory,
    planned_episode_tokens,
)
from perilune.tasks.stage.retention import TrainingSpec
from perilune.tasks.stage.sampling import SamplingSpec
from perilune.tasks.stage.stage import Stage, training_plan

HELD_OUT_SAMPLES = 4  # answers to each held-out task


class FlywheelSpec(TrainingSpec, LearnerSettings, SamplingSpec, ForgettingSpec):
    """Fields of a flywheel stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(description="checkpoint to start from")
    steps: int = Field(
        4, ge=1, description="maximum number of rounds; the stage stops earlier after a round without a gain"
    )
    tasks: int = Field(1024, ge=1, le=MAX_TASKS, description="new training tasks per round")
    samples: int = Field(
        4,
        ge=1,
        le=MAX_SAMPLES,
        description="answers per task; of the right ones, the one with the highest mean log-prob is kept",
    )
    updates: int = Field(100, ge=1, description="optimizer steps per round, on the traces of all rounds")
    batch_size: int = Field(
        64, ge=1, le=MAX_TASKS, description="traces per optimizer step. Default for a pretrained model: 16"
    )
    heldout: int = Field(256, ge=2, le=MAX_TASKS, description="held-out tasks to evaluate each round on")
    save_every: int = Field(1, ge=1, description="rounds between checkpoints to resume from")

    def memory_plan(self, config: DecoderConfig, longest: int, device: str) -> StageMemory:
        """Return the memory plan for episodes of at most `longest` tokens after the prompt."""
        return plan_stage_memory(
            config,
            samples=max(self.tasks * self.samples, self.heldout * HELD_OUT_SAMPLES),
            max_tokens=longest,
            token_budget=self.token_budget,
            cache=CacheSettings(device, self.precision),
            learner=self,
        )


class Flywheel(Stage[FlywheelSpec]):
    """Rounds of training a policy on its own right answers."""

    name = "flywheel"
    spec = FlywheelSpec
    loop = "perilune.tasks.flywheel.loop"
    produces = "checkpoint"

    def describe(self, spec: FlywheelSpec, job: Job) -> Mapping[str, object]:
        answers = spec.tasks * spec.samples
        config = model_config(job)
        longest = planned_episode_tokens(job.environment, spec.max_tokens, config)
        memory = spec.memory_plan(config, longest, job.resources.device)
        return {
            "answers": f"{spec.steps} x {spec.tasks} tasks x {spec.samples} = {spec.steps * answers:,}",
            "updates": f"{spec.steps} x {spec.updates}",
            "evaluated on": f"{spec.heldout} held-out tasks before the first round and after each",
            **training_plan(spec, job, memory),
        }


plugin = Flywheel()
