"""The fields of the stages that train on data: sft, preference, reward_model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from perilune.bundle.plugin import Consumes
from perilune.learn.training_settings import LearnerSettings, OptimizerSettings
from perilune.tasks.forgetting.spec import ForgettingSpec
from perilune.tasks.stage.retention import TrainingSpec


class SFTSpec(TrainingSpec, LearnerSettings, ForgettingSpec):
    """Fields of an sft stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(
        "model", description="checkpoint to start from"
    )
    data: Annotated[str, Consumes("dataset")] = Field(description="stage whose traces to train on")
    steps: int = Field(300, ge=1, description="optimizer steps")
    batch_size: int = Field(64, ge=1, description="traces per step")
    warmup: int = Field(20, ge=0, description="optimizer steps of linear warm-up")
    final_lr: float = Field(0.1, ge=0, le=1, description="final learning rate / peak; 1 is constant")
    save_every: int = Field(100, ge=1, description="steps between checkpoints to resume from")


class PairTrainingSpec(TrainingSpec, OptimizerSettings):
    """Fields of the stages that train on preference pairs."""

    data: Annotated[str, Consumes("preferences")] = Field(description="stage whose pairs to train on")
    steps: int = Field(100, ge=1, description="optimizer steps")
    batch_size: int = Field(32, ge=1, description="pairs per step")
    validation: float = Field(0.1, ge=0, lt=1, description="share of tasks whose pairs are held out")
    validate_every: int = Field(20, ge=1, description="steps between validations on the held-out pairs")
    final_lr: float = Field(0.1, ge=0, le=1, description="final learning rate / peak; 1 is constant")
    save_every: int = Field(50, ge=1, description="steps between checkpoints to resume from")


class PreferenceSpec(PairTrainingSpec, LearnerSettings, ForgettingSpec):
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
        0.0, ge=0, description="weight of the penalty when the chosen answer becomes less likely"
    )


class RewardModelSpec(PairTrainingSpec):
    """Fields of a reward_model stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(
        description="checkpoint whose decoder the reward model starts from"
    )
    refresh: Annotated[str | None, Consumes("reward_model")] = Field(
        None, description="reward model to continue training, for example on its failures"
    )
    replay: Annotated[str | None, Consumes("preferences")] = Field(
        None, description="older pairs to train on too, so that the model keeps ranking them right"
    )
    centre: float = Field(
        0.01, ge=0, description="weight of the penalty that draws mean scores of pairs to 0"
    )
