"""The fields of an rl stage."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from perilune.bundle.plugin import Consumes
from perilune.learn.process_rewards import ProcessRewardField
from perilune.learn.training_settings import AlgorithmSettings, LearnerSettings
from perilune.tasks.stage.retention import Saving
from perilune.tasks.stage.sampling import SamplingSpec


class RLSpec(Saving, AlgorithmSettings, LearnerSettings, SamplingSpec):
    """Fields of an rl stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(description="where the policy starts")
    steps: int = Field(100, ge=1, description="batches of episodes, sampled and learned from")
    prompts: int = Field(32, ge=1, description="tasks a step")
    samples: int = Field(8, ge=1, description="episodes a task: the size of a group")
    reward_model: Annotated[str | None, Consumes("reward_model")] = Field(
        None,
        description="stage whose reward model gives the reward; the verifier's score is then only recorded",
    )
    verifier_weight: float = Field(
        0.0, ge=0, description="weight of the verifier's score in the reward, beside a reward model"
    )
    process_rewards: ProcessRewardField = Field(
        None, description="process rewards: a name, or a section of a name and its options"
    )

    @property
    def uses_reference(self) -> bool:
        """Whether the policy is compared with the one that training started from."""
        return self.kl > 0 or "deviation" in self.algorithm.needs

    @model_validator(mode="after")
    def _large_enough(self) -> RLSpec:
        least = self.algorithm.least_samples
        if self.samples < least:
            raise ValueError(
                f"samples is {self.samples}, and {self.algorithm.name} compares at least {least}"
            )
        return self

    @model_validator(mode="after")
    def _takes_the_kl(self) -> RLSpec:
        if self.kl and self.kl_estimator == "k1_reward" and not self.algorithm.takes_any_reward:
            raise ValueError(
                f"kl_estimator is k1_reward, which makes rewards negative, and {self.algorithm.name} takes"
                " rewards from 0 upwards or verdicts: k2 has the same gradient as a loss"
            )
        return self

    @model_validator(mode="after")
    def _takes_process_rewards(self) -> RLSpec:
        if self.process_rewards is None:
            return self
        if self.algorithm.takes_step_rewards != (self.process_rewards.role == "reward"):
            right = "reward" if self.algorithm.takes_step_rewards else "bonus, advantage or trace"
            raise ValueError(
                f"process_rewards.role is {self.process_rewards.role}, and {self.algorithm.name} takes"
                f" process rewards as {right}"
            )
        if self.reward_model and self.process_rewards.name == "montecarlo":
            raise ValueError(
                "process_rewards: montecarlo plays for the verifier's verdict, and a reward model is climbed"
            )
        return self
