"""calibrate: checks process rewards from a policy's likelihoods before training on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, model_validator

from perilune.bundle.job import Job
from perilune.bundle.plugin import Consumes
from perilune.learn.process_rewards import AnswerValues, ProcessRewardField
from perilune.tasks.stage.bounds import MAX_SAMPLES, MAX_TASKS
from perilune.tasks.stage.memory_plan import CacheSettings, model_config, plan_stage_memory
from perilune.tasks.stage.sampling import SamplingSpec
from perilune.tasks.stage.stage import Stage


class CalibrateSpec(SamplingSpec):
    """Fields of a calibrate stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(
        description="stage whose checkpoint samples and gives the values"
    )
    tasks: int = Field(64, ge=2, le=MAX_TASKS, description="held-out tasks")
    samples: int = Field(4, ge=1, le=MAX_SAMPLES, description="answers per task")
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


class Calibrate(Stage[CalibrateSpec]):
    """Compares the process rewards of an rl stage with Monte Carlo values of the same prefixes."""

    name = "calibrate"
    spec = CalibrateSpec
    loop = "perilune.tasks.process_rewards.calibrate"
    produces = "evaluation"
    output = "artifacts/summary.json"

    def describe(self, spec: CalibrateSpec, job: Job) -> Mapping[str, object]:
        answers = spec.tasks * spec.samples
        max_prefixes = spec.process_rewards.segments.most if spec.process_rewards else 0
        memory = plan_stage_memory(
            model_config(job),
            samples=answers,
            max_tokens=spec.max_tokens,
            cache=CacheSettings(job.resources.device),
        )
        return {
            "answers": f"{spec.tasks} held-out tasks x {spec.samples} = {answers:,}",
            "continuations": f"{spec.continuations} from each of at most {max_prefixes} prefixes per answer",
            "memory": memory,
        }


plugin = Calibrate()
