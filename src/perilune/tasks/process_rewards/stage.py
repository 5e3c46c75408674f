"""calibrate: checks process rewards from a policy's likelihoods before training on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, model_validator

from perilune.bundle.job import Job
from perilune.bundle.plugin import Consumes
from perilune.environments.core.registry import make_environment
from perilune.learn.process_rewards import AnswerValues, ProcessRewardField
from perilune.models.config.decoder_config import DecoderConfig
from perilune.tasks.process_rewards.requirements import check_process_rewards
from perilune.tasks.stage.bounds import MAX_SAMPLES, MAX_TASKS
from perilune.tasks.stage.memory_plan import StageMemory, model_config, sampling_plan
from perilune.tasks.stage.sampling import SamplingSpec
from perilune.tasks.stage.stage import Stage


class CalibrateSpec(SamplingSpec):
    """Fields of a calibrate stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(
        description="stage whose checkpoint samples the answers and estimates the values of their prefixes"
    )
    tasks: int = Field(64, ge=2, le=MAX_TASKS, description="held-out tasks")
    samples: int = Field(4, ge=1, le=MAX_SAMPLES, description="answers per task")
    continuations: int = Field(
        16,
        ge=2,
        description="continuations sampled from each prefix of an answer, for the Monte Carlo values",
    )
    process_rewards: ProcessRewardField = Field(
        AnswerValues(), description="process rewards to calibrate: `answer`, or a section with that name"
    )
    token_budget: int = Field(
        4096,
        ge=1,
        description="maximum tokens of a forward pass, which limits its memory; a longer sequence has a"
        " pass of its own. Default for a pretrained model: by the memory that a pass takes,"
        " 512 to 16384",
    )

    @model_validator(mode="after")
    def _check_process_rewards(self) -> CalibrateSpec:
        if self.process_rewards is None or self.process_rewards.name != "answer":
            raise ValueError("calibrate takes process_rewards: answer, or a section with that name")
        return self

    @property
    def max_prefixes(self) -> int:
        """The most prefixes of an answer from which continuations are sampled."""
        return self.process_rewards.segments.most if self.process_rewards else 0

    def memory_plan(self, config: DecoderConfig, longest: int, device: str) -> StageMemory:
        """Return the memory plan for episodes of at most `longest` tokens after the prompt."""
        at_a_time = self.tasks * self.samples * max(1, self.max_prefixes * self.continuations)
        return sampling_plan(at_a_time)(config, longest, device)


class Calibrate(Stage[CalibrateSpec]):
    """Compares the process rewards of an rl stage with Monte Carlo values of the same prefixes."""

    name = "calibrate"
    spec = CalibrateSpec
    loop = "perilune.tasks.process_rewards.calibrate"
    produces = "evaluation"
    output = "artifacts/summary.json"

    def describe(self, spec: CalibrateSpec, job: Job) -> Mapping[str, object]:
        check_process_rewards(spec.process_rewards, make_environment(job.environment))
        answers, prefixes = spec.tasks * spec.samples, spec.max_prefixes
        return {
            "answers": f"{spec.tasks} held-out tasks x {spec.samples} = {answers:,}",
            "continuations": f"{spec.continuations} from each of at most {prefixes} prefixes per answer",
            "memory": spec.memory_plan(model_config(job), spec.max_tokens, job.resources.device),
        }


plugin = Calibrate()
