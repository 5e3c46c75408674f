"""The fields of the stages that train on data: sft, preference, reward_model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from perilune.bundle.plugin import Consumes
from perilune.learn.training_settings import LearnerSettings, OptimizerSettings
from perilune.tasks.stage.retention import Saving


class SFTSpec(Saving, LearnerSettings):
    """Fields of an sft stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field("model", description="where the weights start")
    data: Annotated[str, Consumes("dataset")] = Field(description="stage whose traces are imitated")
    steps: int = Field(300, ge=1, description="optimizer steps")
    batch_size: int = Field(64, ge=1, description="traces a step")
    warmup: int = Field(20, ge=0, description="optimizer steps of linear warm-up")
    final_lr: float = Field(0.1, ge=0, le=1, description="last learning rate over peak; 1 is constant")
    save_every: int = Field(100, ge=1, description="steps between two checkpoints to resume from")


class PreferenceSpec(Saving, LearnerSettings):
    """Fields of a preference stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(
        description="where the weights start; frozen, it is the reference too"
    )
    data: Annotated[str, Consumes("preferences")] = Field(description="stage whose pairs are learned from")
    loss: Literal["dpo", "dpo_norm", "ipo"] = Field(
        "dpo", description="dpo, dpo_norm (on means a token) or ipo (on means a token)"
    )
    beta: float = Field(0.1, gt=0, description="how hard the reference holds; tau of ipo")
    nll: float = Field(
        0.0, ge=0, description="weight of the chosen answer's own cross-entropy, against collapse"
    )
    dpop: float = Field(
        0.0, ge=0, description="weight of the hinge on the chosen answer's fall, against collapse"
    )
    steps: int = Field(100, ge=1, description="optimizer steps")
    batch_size: int = Field(32, ge=1, description="pairs a step")
    validation: float = Field(0.1, ge=0, lt=1, description="share of tasks whose pairs are held out")
    validate_every: int = Field(20, ge=1, description="steps between two looks at them")
    final_lr: float = Field(0.1, ge=0, le=1, description="last learning rate over peak; 1 is constant")
    save_every: int = Field(50, ge=1, description="steps between two checkpoints to resume from")


class RewardModelSpec(Saving, OptimizerSettings):
    """Fields of a reward_model stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(description="whose body it is built on")
    data: Annotated[str, Consumes("preferences")] = Field(description="stage whose pairs are learned from")
    refresh: Annotated[str | None, Consumes("reward_model")] = Field(
        None, description="reward model to go on from, with the new failures in data"
    )
    replay: Annotated[str | None, Consumes("preferences")] = Field(
        None, description="older pairs to learn from beside data, so that they are not forgotten"
    )
    centre: float = Field(0.01, ge=0, description="how strongly the mean score of a pair is drawn to 0")
    steps: int = Field(100, ge=1, description="optimizer steps")
    batch_size: int = Field(32, ge=1, description="pairs a step")
    validation: float = Field(0.1, ge=0, lt=1, description="share of tasks whose pairs are held out")
    validate_every: int = Field(20, ge=1, description="steps between two looks at them")
    final_lr: float = Field(0.1, ge=0, le=1, description="last learning rate over peak; 1 is constant")
    save_every: int = Field(50, ge=1, description="steps between two checkpoints to resume from")
