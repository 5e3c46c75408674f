"""The fields of an rl stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

from pydantic import Field, model_validator

from perilune.bundle.plugin import Consumes
from perilune.learn.process_rewards import ProcessRewardField
from perilune.learn.training_settings import AlgorithmSettings, LearnerSettings
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.memory import base_bytes
from perilune.tasks.rl.asynchronous.settings import AsynchronousSettings, default_corrections
from perilune.tasks.rl.auxiliary_rewards import AuxiliaryRewards
from perilune.tasks.rl.curriculum_settings import CurriculumSettings
from perilune.tasks.stage.bounds import MAX_SAMPLES, MAX_TASKS
from perilune.tasks.stage.custom_metrics import CustomMetricsField
from perilune.tasks.stage.defaults import ForgettingSpec
from perilune.tasks.stage.evaluation_settings import EvaluatedSpec
from perilune.tasks.stage.memory_plan import (
    OTHER_PROCESSES,
    WEIGHTS_COPY,
    CacheSettings,
    StageMemory,
    plan_stage_memory,
)
from perilune.tasks.stage.sampling import (
    OpenVinoSpec,
    RecordingSpec,
    TrainedServerSpec,
    TrainingEngineField,
    check_server_temperature,
)


class RLSpec(EvaluatedSpec, AlgorithmSettings, LearnerSettings, RecordingSpec, ForgettingSpec):
    """Fields of an rl stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(description="checkpoint to start from")
    steps: int = Field(100, ge=1, description="training steps; each samples a batch of episodes")
    prompts: int = Field(
        32, ge=1, le=MAX_TASKS, description="tasks per step. Default for a pretrained model: 16"
    )
    samples: int = Field(8, ge=1, le=MAX_SAMPLES, description="episodes per task: the size of a group")
    reward_model: Annotated[str | None, Consumes("reward_model")] = Field(
        None,
        description="stage whose reward model gives the reward; unless verifier_weight is above 0, the"
        " verifier's score is then only recorded",
    )
    verifier_weight: float = Field(
        0.0,
        ge=0,
        description="with reward_model: the reward is the reward model's score + verifier_weight * the"
        " verifier's score",
    )
    auxiliary_rewards: AuxiliaryRewards | None = Field(
        None, description="reward terms to add to the reward, with weights that fall to 0"
    )
    process_rewards: ProcessRewardField = Field(
        None, description="process rewards: a name, or a section with a name and options"
    )
    metrics: CustomMetricsField = Field({}, description="metrics of your own by name, each a function")
    curriculum: CurriculumSettings | None = Field(
        None,
        description="draw tasks by their pass rate, preferring tasks with both right and wrong answers;"
        " {} uses the defaults",
    )
    routing_replay: bool = Field(
        False,
        description="for a mixture of experts: compute each token in training with the experts that computed"
        " it in sampling",
    )

    sub_agent_checkpoint: Annotated[str | None, Consumes("checkpoint")] = Field(
        None,
        description="stage whose frozen checkpoint samples the turns of sub-agents; null: the policy"
        " samples them",
    )
    train_sub_agents: bool = Field(
        False, description="train on the turns of sub-agents too, each with the reward of its episode"
    )
    engine: TrainingEngineField = Field(
        None, description="sampling engine: openvino, a server, or null for Perilune's own engine"
    )
    asynchronous: AsynchronousSettings | None = Field(
        None, description="sample in separate processes while training; {} uses the defaults"
    )

    @property
    def uses_reference(self) -> bool:
        """True if training needs the initial policy."""
        return self.kl > 0 or "deviation" in self.algorithm.needs

    @property
    def server(self) -> TrainedServerSpec | None:
        """The server that samples; None if Perilune's or OpenVINO's engine does."""
        return self.engine if isinstance(self.engine, TrainedServerSpec) else None

    @property
    def openvino(self) -> OpenVinoSpec | None:
        """The settings of OpenVINO; None if OpenVINO does not compute the engine's steps."""
        return self.engine if isinstance(self.engine, OpenVinoSpec) else None

    @property
    def max_samples(self) -> int:
        """Most answers that this process samples together, in training or evaluation."""
        evaluated = self.eval.tasks * self.eval.samples if self.eval else 1
        return evaluated if self.server else max(self.prompts * self.samples, evaluated)

    def memory_plan(self, config: DecoderConfig, longest: int, device: str) -> StageMemory:
        """Return the memory plan for episodes of at most `longest` tokens after the prompt."""
        cache = CacheSettings(device, self.precision)
        plan = plan_stage_memory(
            config,
            samples=self.max_samples,
            max_tokens=longest,
            token_budget=self.token_budget,
            reference=self.uses_reference,
            learner=self,
            cache=cache,
        )
        sampling = self.sampling_plan(config, longest, device)
        if self.sub_agent_checkpoint is not None:
            plan = replace(plan, persistent={**plan.persistent, "sub-agents": sampling.total})
        if self.reward_model is not None:  # the plan assumes the size of the policy
            reward_model = base_bytes(config, "float32")
            plan = replace(plan, persistent={**plan.persistent, "reward model": reward_model})
        if self.asynchronous is None:
            return plan
        local = self.asynchronous.workers if self.asynchronous.ray is None else 0
        persistent = {**plan.persistent, OTHER_PROCESSES: local * sampling.total}
        if self.asynchronous.keeps_weights_copy(self):
            persistent[WEIGHTS_COPY] = plan.persistent["weights"] // 2
        return replace(plan, persistent=persistent)

    def sampling_plan(self, config: DecoderConfig, longest: int, device: str) -> StageMemory:
        """Return the memory plan of an engine that only samples: for sub-agents, or in a rollout process."""
        groups = self.prompts
        if self.asynchronous is not None:
            groups = -(-groups * (self.asynchronous.staleness + 1) // self.asynchronous.workers)
        cache = CacheSettings(device, self.precision)
        return plan_stage_memory(config, samples=groups * self.samples, max_tokens=longest, cache=cache)

    @model_validator(mode="after")
    def _set_default_corrections(self) -> RLSpec:
        """Set the off-policy corrections of asynchronous training, unless the recipe sets its own.

        A `before` validator is no alternative: the fields would then be validated as Python values, for which
        strict mode does not accept a list where a tuple is expected.
        """
        if self.asynchronous is not None and self.off_policy is None:
            updates = self.updates_per_batch * self.epochs_per_batch
            corrections = default_corrections(self.asynchronous, updates)
            object.__setattr__(self, "off_policy", corrections)  # the model is frozen
        return self

    @model_validator(mode="after")
    def _check_fields(self) -> RLSpec:
        for conflict in self._conflicts():
            raise ValueError(conflict)
        check_server_temperature(self.engine, self.temperature)
        return self

    def _conflicts(self) -> Iterator[str]:
        """Yield a sentence with a remedy for fields that do not work together."""
        yield from self._asynchronous_conflicts()
        yield from self._server_conflicts()
        if self.verifier_weight and self.reward_model is None:
            yield "verifier_weight needs reward_model: without one, the verifier's score is the reward"
        yield from self._sub_agent_conflicts()
        yield from self._algorithm_conflicts()
        yield from self._process_reward_conflicts()

    def _asynchronous_conflicts(self) -> Iterator[str]:
        if self.asynchronous is None:
            return
        if self.algorithm.refills:
            yield (
                f"{self.algorithm.name} replaces dead groups, which asynchronous training cannot do yet."
                " Choose another algorithm, or remove asynchronous"
            )
        if self.top_logprobs:
            yield "asynchronous training records no top_logprobs. Remove one of them"
        if not self.asynchronous.keep_sent and self.updates_per_batch * self.epochs_per_batch > 1:
            yield (
                "asynchronous.keep_sent is false, and only one update can be reversed."
                " Keep the copy, or set updates_per_batch and epochs_per_batch to 1"
            )

    def _server_conflicts(self) -> Iterator[str]:
        others = {
            "asynchronous": self.asynchronous is not None,
            "routing_replay": self.routing_replay,
            "top_logprobs": self.top_logprobs > 0,
            "sub-agents": self.train_sub_agents or self.sub_agent_checkpoint is not None,
            "process_rewards": self.process_rewards is not None,
        }
        if self.server and (found := [name for name, is_set in others.items() if is_set]):
            yield f"engine is a server, which does not work with {found[0]} yet. Remove one of them"

    def _sub_agent_conflicts(self) -> Iterator[str]:
        others = {
            "sub_agent_checkpoint": self.sub_agent_checkpoint is not None,
            "reward_model": self.reward_model is not None,
            "process_rewards": self.process_rewards is not None,
            f"algorithm {self.algorithm.name}, which replaces dead groups,": self.algorithm.refills > 0,
        }
        if self.train_sub_agents and (found := [name for name, is_set in others.items() if is_set]):
            yield f"train_sub_agents does not work with {found[0]} yet. Remove one of them"
        if self.asynchronous and (self.train_sub_agents or self.sub_agent_checkpoint):
            yield "asynchronous training cannot sample sub-agents yet. Remove asynchronous"

    def _algorithm_conflicts(self) -> Iterator[str]:
        algorithm = self.algorithm
        if self.samples < algorithm.least_samples:
            needed = f"{algorithm.name} needs at least {algorithm.least_samples} per group"
            yield f"samples is {self.samples}, and {needed}. Raise samples"
        if self.curriculum and self.curriculum.importance_weight and algorithm.refills:
            yield (
                "curriculum.importance_weight restores the uniform objective, and"
                f" {algorithm.name} drops dead groups. Remove one of them"
            )
        if self.auxiliary_rewards and hasattr(algorithm, "passes_at"):
            yield (
                f"{algorithm.name} recognizes right answers by their reward, which auxiliary_rewards change."
                " Choose another algorithm, or remove auxiliary_rewards"
            )
        if self.kl and self.kl_estimator == "k1_reward":
            remedy = "Set kl_estimator to k2, a loss with the same gradient"
            if not algorithm.takes_any_reward:
                yield (
                    "kl_estimator is k1_reward, which makes rewards negative, and"
                    f" {algorithm.name} needs verdicts or rewards of at least 0. {remedy}"
                )
            elif algorithm.refills:
                yield (
                    "kl_estimator is k1_reward, which makes all rewards of a group differ, and"
                    f" {algorithm.name} replaces groups of equal rewards. {remedy}"
                )

    def _process_reward_conflicts(self) -> Iterator[str]:
        settings, algorithm = self.process_rewards, self.algorithm
        if settings is None:
            return
        if algorithm.takes_step_rewards != (settings.role == "reward"):
            expected = "reward" if algorithm.takes_step_rewards else "bonus, advantage or trace"
            yield (
                f"process_rewards.role is {settings.role}, and {algorithm.name} takes"
                f" process rewards as {expected}. Set process_rewards.role: {expected}"
            )
        if self.kl and self.kl_estimator == "k1_reward" and settings.role in ("advantage", "trace"):
            yield (
                "kl_estimator is k1_reward, which changes the algorithm's advantages, and"
                f" process_rewards.role {settings.role} replaces them. Set kl_estimator to k2, a loss with"
                " the same gradient"
            )
        if self.reward_model and settings.name == "montecarlo":
            yield (
                "process_rewards: montecarlo estimates the verifier's score, and the reward is that of"
                " reward_model. Remove one of them"
            )
