"""The recipe fields of learning, with their defaults."""

from importlib.metadata import version
from typing import Literal, get_args

from pydantic import Field

from perilune.errors import RequestError
from perilune.frozen import Frozen
from perilune.learn.algorithms import RLAlgorithm
from perilune.learn.algorithms.group_relative import GRPO
from perilune.learn.off_policy import OffPolicySettings
from perilune.learn.weights import KLEstimator
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.memory import adapter_parameters, check_base_kind
from perilune.plural import plural


class AlgorithmSettings(Frozen):
    """The algorithm, and how a batch of episodes is split into updates."""

    algorithm: RLAlgorithm = Field(GRPO(), description="a name, or a section with a name and options")
    kl: float = Field(0.0, ge=0, description="coefficient of the KL to the initial policy; 0 is off")
    kl_estimator: KLEstimator = Field(
        "k3",
        description="estimator of the KL. k3: a loss with the gradient of KL(initial, policy); k2: a loss"
        " with the gradient of KL(policy, initial) on-policy; k3_corrected: a loss with the"
        " gradient of KL(policy, initial) off-policy too (the default of TRL 1.16); k1_reward:"
        " subtract the KL from the rewards",
    )
    updates_per_batch: int = Field(
        1,
        ge=1,
        description="number of minibatches into which a batch of episodes is split; each gives one"
        " optimizer step per epoch",
    )
    epochs_per_batch: int = Field(1, ge=1, description="number of passes over each batch of episodes")
    off_policy: OffPolicySettings | None = Field(
        None,
        description="corrections for samples of another policy. Default: none on a CPU; truncated weights"
        " (proximal: learner, weight: truncate) on other devices, with a server as engine, and"
        " in asynchronous training, which also sets max_staleness",
    )


MIN_SHARDING_TORCH = (2, 8)  # major and minor version


def check_can_shard(*, adapter: bool, experts: bool) -> None:
    """Check that the model can be sharded.

    Raises:
        RequestError: for an adapter or a mixture of experts.
    """
    remedy = "set sharded: false; the processes share the work in any case"
    if adapter:
        raise RequestError(
            "LoRA trains only an adapter, which is too small to shard",
            where="resources.sharded",
            remedy=remedy,
        )
    if experts:
        message = "a mixture of experts cannot be sharded, because a micro-batch reaches only some experts"
        raise RequestError(message, where="resources.sharded", remedy=remedy)


def check_sharding_torch() -> None:
    """Check that the installed torch can shard: FSDP2 can sum gradients since torch 2.8.

    Raises:
        RequestError: when it is older.
    """
    installed = version("torch")
    major, minor = (int(part) for part in installed.split(".")[:2])
    if (major, minor) < MIN_SHARDING_TORCH:
        needed = ".".join(map(str, MIN_SHARDING_TORCH))
        raise RequestError(
            f"sharding needs torch {needed} or newer, and torch {installed} is installed",
            where="resources.sharded",
            remedy=f"pip install 'torch>={needed}', or set sharded: false",
        )


class OptimizerSettings(Frozen):
    """AdamW and its learning rate."""

    lr: float | None = Field(
        None,
        gt=0,
        le=10,
        description="peak learning rate; the default depends on the task, the model and `lora`",
    )
    warmup: int = Field(
        10,
        ge=0,
        description="steps of linear warm-up; in flywheel, optimizer steps. Default for a pretrained"
        " model: a tenth of the steps, at most 20",
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine",
        description="decay of the learning rate after the warm-up, from the peak to final_lr times the"
        " peak; constant ignores final_lr",
    )
    final_lr: float = Field(
        1.0, ge=0, le=1, description="final learning rate divided by the peak; 1: no decay"
    )
    beta2: float = Field(0.99, gt=0, lt=1, description="decay rate of AdamW's second moments")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay, for matrices only")
    grad_clip: float = Field(
        1.0, gt=0, description="maximum norm of the gradient; a larger gradient is scaled down to it"
    )
    token_budget: int = Field(
        4096,
        ge=1,
        description="maximum tokens of a forward pass, which limits its memory; a longer sequence has a"
        " pass of its own. Default for a pretrained model: by the memory that a pass takes,"
        " 512 to 16384",
    )

    @property
    def peak_lr(self) -> float:
        """The peak learning rate, after defaults are filled in."""
        if self.lr is None:
            raise ValueError("lr has no value yet")
        return self.lr

    def describe_schedule(self, steps: int) -> str:
        """Describe the learning rate over `steps` training steps, for the plan."""
        if steps < self.warmup:
            rise = f"rises to {self.peak_lr * steps / self.warmup:g} in {plural(steps, 'step')}"
            return f"{rise}, because the warm-up to {self.peak_lr:g} takes {self.warmup}"
        start = f"{self.peak_lr:g} after {self.warmup} warm-up steps"
        if self.schedule == "constant" or self.final_lr == 1:
            return f"{start}, then constant"
        return f"{start}, then {self.schedule} to {self.peak_lr * self.final_lr:g}"


LoRATarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoRASettings(Frozen):
    """Low-rank adaptation: a frozen model with a small trained adapter.

    There is no dropout, because with dropout the policy that learns would differ from the policy that
    samples, and the log-prob gap of every step would not be 0.
    """

    rank: int = Field(16, ge=1, description="rank of the adapter's matrices")
    alpha: float = Field(32.0, gt=0, description="the adapter is scaled by alpha / rank")
    targets: tuple[LoRATarget, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="linear layers that get an adapter; a layer of the model may lack some of them",
    )
    base: Literal["float32", "bfloat16", "int8"] = Field(
        "float32",
        description="precision of the frozen matrices; bfloat16 and int8 round them, which changes the"
        " initial policy",
    )

    def check(self, config: DecoderConfig) -> None:
        """Check the adapter against a model.

        Raises:
            RequestError: when the rank exceeds that of every matrix, the model lacks a target, or its experts
                cannot be stored as `base`.
        """
        widest = config.hidden_size  # a dimension of every linear map that may get an adapter
        if self.rank > widest:
            raise RequestError(
                f"{self.rank:,} exceeds the rank of every matrix of this model, {widest:,} at most",
                where="lora.rank",
                remedy=f"set it to {widest} at most; 8 to 64 is usual",
            )
        available = [name for name in get_args(LoRATarget) if adapter_parameters(config, 1, [name])]
        missing = [name for name in self.targets if name not in available]
        if missing and len(set(self.targets)) < len(get_args(LoRATarget)):
            raise RequestError(
                f"this model has no linear map {missing[0]}",
                where="lora.targets",
                remedy=f"choose from {', '.join(available)}",
            )
        check_base_kind(config, self.base)


class LearnerSettings(OptimizerSettings):
    """The trained parameters and their precision."""

    lora: LoRASettings | None = Field(
        None, description="train an adapter and freeze the model; {} uses the defaults"
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="precision of matrix products; weights, moments and losses stay in float32",
    )
    activation_checkpointing: bool = Field(
        False, description="recompute each layer in the backward pass, to save memory"
    )
    restore_optimizer: bool = Field(
        False,
        description="start with AdamW's second moments of the stage that made the checkpoint, which must"
        " set keep.optimizer; their scale is that of the loss of that stage",
    )

    def describe_learning(self) -> dict[str, str]:
        """Return the settings that differ from the defaults, as a line of the plan."""
        parts = [f"{self.precision} products"] if self.precision != "float32" else []
        if self.lora is not None:
            rank = f"rank {self.lora.rank}, alpha {self.lora.alpha:g}"
            parts.insert(0, f"adapter of {rank}, base in {self.lora.base}")
        if self.activation_checkpointing:
            parts.append("layers recomputed")
        if self.restore_optimizer:
            parts.append("second moments of the previous stage")
        return {"learning": ", ".join(parts)} if parts else {}
