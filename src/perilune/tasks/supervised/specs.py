"""The fields of the stages that train on data: sft, preference, reward_model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator, model_validator

from perilune.bundle.job import Job
from perilune.bundle.plugin import Consumes
from perilune.frozen import Frozen
from perilune.learn.training_settings import LearnerSettings, OptimizerSettings
from perilune.tasks.forgetting.spec import ForgettingSpec
from perilune.tasks.stage.evaluation_settings import EvaluatedSpec
from perilune.tasks.stage.memory_plan import CacheSettings, StageMemory, plan_stage_memory
from perilune.tasks.stage.retention import TrainingSpec

if TYPE_CHECKING:
    from perilune.models.config.decoder_config import DecoderConfig
    from perilune.models.text.tokenizer import Tokenizer
    from perilune.tasks.supervised.tokens import RowReader


class RowSpec(Frozen):
    """Fields of the stages that read rows: the longest row, and what to do with a longer one."""

    max_length: int | None = Field(
        None,
        ge=2,
        description="maximum tokens of a row with its prompt; null: as many as the model has positions",
    )
    too_long: Literal["error", "drop", "truncate"] = Field(
        "error",
        description="what to do with a longer row: error refuses the data, drop leaves the row out, truncate"
        " keeps its start (sft only)",
    )

    def reader(self, tokenizer: Tokenizer, config: DecoderConfig) -> RowReader:
        """Return a reader of rows with these settings, for a model."""
        from perilune.tasks.supervised.tokens import RowReader

        return RowReader(tokenizer, config.max_position_embeddings, self.max_length, self.too_long)


class SFTSpec(EvaluatedSpec, LearnerSettings, ForgettingSpec, RowSpec):
    """Fields of an sft stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(
        "model", description="checkpoint to start from"
    )
    data: Annotated[str, Consumes("dataset", files=True)] = Field(
        description="stage whose traces to train on, or a file or folder of your own"
    )
    steps: int = Field(300, ge=1, description="optimizer steps")
    batch_size: int = Field(64, ge=1, description="traces per step")
    warmup: int = Field(20, ge=0, description="optimizer steps of linear warm-up")
    final_lr: float = Field(0.1, ge=0, le=1, description="final learning rate / peak; 1 is constant")
    save_every: int = Field(100, ge=1, description="steps between checkpoints to resume from")
    validation: float = Field(
        0.0, ge=0, lt=1, description="share of prompts whose traces are held out, for the data/loss of eval"
    )

    @model_validator(mode="after")
    def _check_validation(self) -> SFTSpec:
        if self.validation and self.eval is None:
            raise ValueError(
                "validation holds out rows for eval, and eval is not set. Set eval, or validation: 0"
            )
        return self


class PairTrainingSpec(TrainingSpec, OptimizerSettings, RowSpec):
    """Fields of the stages that train on preference pairs."""

    data: Annotated[str, Consumes("preferences", files=True)] = Field(
        description="stage whose pairs to train on, or a file or folder of your own"
    )
    steps: int = Field(100, ge=1, description="optimizer steps")
    batch_size: int = Field(32, ge=1, description="pairs per step")
    validation: float = Field(0.1, ge=0, lt=1, description="share of tasks whose pairs are held out")
    validate_every: int = Field(20, ge=1, description="steps between validations on the held-out pairs")
    final_lr: float = Field(0.1, ge=0, le=1, description="final learning rate / peak; 1 is constant")
    save_every: int = Field(50, ge=1, description="steps between checkpoints to resume from")

    @field_validator("too_long")
    @classmethod
    def _check_too_long(cls, too_long: str) -> str:
        if too_long == "truncate":
            raise ValueError(
                "pairs cannot be truncated, because they would teach truncation. Set too_long: drop"
            )
        return too_long


class PreferenceSpec(PairTrainingSpec, EvaluatedSpec, LearnerSettings, ForgettingSpec):
    """Fields of a preference stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(
        description="checkpoint to start from; a frozen copy is the reference"
    )
    loss: Literal["dpo", "dpo_norm", "ipo"] = Field(
        "dpo", description="dpo, dpo_norm or ipo; the last two use log-probs averaged over tokens"
    )
    beta: float = Field(0.1, gt=0, description="strength of the KL constraint to the reference; ipo's tau")
    nll: float = Field(0.0, ge=0, description="weight of the chosen answer's cross-entropy, against collapse")
    dpop: float = Field(
        0.0,
        ge=0,
        description="DPOP's lambda: weight of a penalty on chosen answers whose log-prob is below the"
        " reference's; the paper uses 50",
    )


def plan_memory(spec: SFTSpec | PreferenceSpec, job: Job, config: DecoderConfig, device: str) -> StageMemory:
    room = spec.evaluation_memory(job, config)
    cache = CacheSettings(device, spec.precision)
    return plan_stage_memory(config, token_budget=spec.token_budget, learner=spec, cache=cache, **room)


class RewardModelSpec(PairTrainingSpec):
    """Fields of a reward_model stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(
        description="checkpoint whose decoder the reward model starts from"
    )
    refresh: Annotated[str | None, Consumes("reward_model")] = Field(
        None, description="reward model to continue training, for example on its failures"
    )
    replay: Annotated[str | None, Consumes("preferences", files=True)] = Field(
        None, description="older pairs to train on too, so that the model keeps ranking them right"
    )
    centre: float = Field(
        0.01, ge=0, description="weight of the penalty that draws mean scores of pairs to 0"
    )
