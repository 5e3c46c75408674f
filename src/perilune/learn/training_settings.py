"""What a user may say about learning. Defaults live here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from perilune.learn.algorithms import RLAlgorithm
from perilune.learn.algorithms.group_relative import GRPO
from perilune.learn.learning_rates import with_default_lr
from perilune.learn.off_policy import OffPolicySettings
from perilune.learn.weights import KLEstimator


class AlgorithmSettings(BaseModel):
    """How rewards become a loss."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    algorithm: RLAlgorithm = Field(GRPO(), description="a name, or a section of a name and its options")
    kl: float = Field(0.0, ge=0, description="coefficient of the KL to the starting policy; 0 is off")
    kl_estimator: KLEstimator = Field(
        "k3",
        description="k3 has the gradient of KL(start, policy), k2 that of KL(policy, start), k3_corrected the"
        " same off-policy too (TRL's default); k1_reward takes the KL off the rewards",
    )
    updates_per_batch: int = Field(
        1, ge=1, description="parts that a batch of episodes is cut into, an optimizer step each"
    )
    epochs_per_batch: int = Field(1, ge=1, description="how often a batch of episodes is learned from")
    off_policy: OffPolicySettings = Field(
        OffPolicySettings(), description="what is done about samples of another policy"
    )


class OptimizerSettings(BaseModel):
    """AdamW and its learning rate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: float | None = Field(
        None, gt=0, description="peak learning rate; by default chosen for the model, as `run --plan` shows"
    )
    warmup: int = Field(10, ge=0, description="optimizer steps of linear warm-up")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="how the learning rate falls to final_lr after warm-up; constant ignores it"
    )
    final_lr: float = Field(1.0, ge=0, le=1, description="last learning rate over peak; 1 is constant")
    beta2: float = Field(0.99, gt=0, lt=1, description="decay of AdamW's second moments")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay, on matrices")
    grad_clip: float = Field(1.0, gt=0, description="largest norm of the gradient")
    token_budget: int = Field(4096, ge=1, description="tokens in one forward pass, a matter of memory")

    @classmethod
    def complete(cls, task: str, spec: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a stage with the defaults that depend on the recipe's model section."""
        return with_default_lr(task, spec, model)

    @property
    def peak_lr(self) -> float:
        """The peak learning rate, once it has been stated or chosen."""
        if self.lr is None:
            raise ValueError("lr has not been chosen")
        return self.lr

    def describe_schedule(self) -> str:
        """The learning rate over time, for the plan."""
        start = f"{self.peak_lr:g} after {self.warmup} steps"
        if self.schedule == "constant" or self.final_lr == 1:
            return f"{start}, then constant"
        return f"{start}, {self.schedule} to {self.peak_lr * self.final_lr:g}"


LoRATarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoRASettings(BaseModel):
    """Low-rank adaptation: a frozen model, and a small adapter that learns.

    There is no dropout: with it the policy that learns would not be the one that sampled, and the log-prob
    gap that every step measures would not be zero.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(16, ge=1, description="of the adapter's matrices")
    alpha: float = Field(32.0, gt=0, description="the adapter counts alpha / rank times")
    targets: tuple[LoRATarget, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="linear maps of every layer that get one",
    )
    base: Literal["float32", "bfloat16", "int8"] = Field(
        "float32", description="how the frozen matrices are kept; rounding them changes where training starts"
    )


class LearnerSettings(OptimizerSettings):
    """What of a policy learns, and how it is computed."""

    lora: LoRASettings | None = Field(
        None, description="learn an adapter beside the frozen model; {} takes the defaults"
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="of the products of learning and sampling; weights, moments and losses are float32",
    )
    activation_checkpointing: bool = Field(
        False, description="compute each layer twice, and keep only what went into it: less memory"
    )
    restore_optimizer: bool = Field(
        False,
        description="start from AdamW's second moments of the stage that made the checkpoint; they have the"
        " scale of its loss",
    )

    def planned(self) -> dict[str, str]:
        """A line of the plan for what is not as by default; empty when all is."""
        parts = [f"{self.precision} products"] if self.precision != "float32" else []
        if self.lora is not None:
            rank = f"rank {self.lora.rank}, alpha {self.lora.alpha:g}"
            parts.insert(0, f"an adapter of {rank}, with a base in {self.lora.base}")
        if self.activation_checkpointing:
            parts.append("layers computed twice")
        if self.restore_optimizer:
            parts.append("second moments of the stage before")
        return {"learning": ", ".join(parts)} if parts else {}
