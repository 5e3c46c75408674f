"""The stages that train on data: sft, preference, reward_model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from perilune.bundle.job import Job
from perilune.bundle.plugin import Consumes, file_fields
from perilune.frozen import Frozen
from perilune.learn.training_settings import LearnerSettings, OptimizerSettings
from perilune.plural import plural
from perilune.tasks.stage.bounds import MAX_TASKS
from perilune.tasks.stage.defaults import ForgettingSpec
from perilune.tasks.stage.evaluation_settings import EvaluatedSpec
from perilune.tasks.stage.memory_plan import CacheSettings, StageMemory, model_config, plan_stage_memory
from perilune.tasks.stage.retention import TrainingSpec
from perilune.tasks.stage.stage import Stage, training_plan

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

    data_figures: ClassVar[tuple[str, ...]] = ("loss",)

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(
        "model", description="checkpoint to start from"
    )
    data: Annotated[str, Consumes("dataset", files=True)] = Field(
        description="stage whose traces to train on, or a file or folder of your own"
    )
    steps: int = Field(300, ge=1, description="optimizer steps")
    batch_size: int = Field(
        64, ge=1, le=MAX_TASKS, description="traces per step. Default for a pretrained model: 16"
    )
    warmup: int = Field(
        20,
        ge=0,
        description="optimizer steps of linear warm-up. Default for a pretrained model: a tenth of the"
        " steps, at most 20",
    )
    final_lr: float = Field(
        0.1, ge=0, le=1, description="final learning rate divided by the peak; 1: no decay"
    )
    save_every: int = Field(100, ge=1, description="steps between checkpoints to resume from")
    validation: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of prompts whose traces are held out; `eval` measures their loss as data/loss",
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
    batch_size: int = Field(
        32, ge=1, le=MAX_TASKS, description="pairs per step. Default for a pretrained model: 16"
    )
    validation: float = Field(0.1, ge=0, lt=1, description="share of tasks whose pairs are held out")
    validate_every: int = Field(20, ge=1, description="steps between validations on the held-out pairs")
    final_lr: float = Field(
        0.1, ge=0, le=1, description="final learning rate divided by the peak; 1: no decay"
    )
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

    data_figures: ClassVar[tuple[str, ...]] = ("loss", "accuracy")

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(
        description="checkpoint to start from; a frozen copy is the reference"
    )
    loss: Literal["dpo", "dpo_norm", "ipo"] = Field(
        "dpo",
        description="preference loss; dpo_norm and ipo average log-probs over the tokens of an answer,"
        " dpo sums them",
    )
    beta: float = Field(
        0.1, gt=0, description="strength of the KL constraint to the reference; for ipo, its tau"
    )
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
        None,
        description="stage whose reward model is trained further, in place of a new one from"
        " `checkpoint`, for example on pairs that it ranks wrongly",
    )
    replay: Annotated[str | None, Consumes("preferences", files=True)] = Field(
        None,
        description="stage or file with older pairs to train on too, so that the model does not forget them",
    )
    centre: float = Field(
        0.01, ge=0, description="weight of a penalty that draws the mean of the two scores of each pair to 0"
    )


class SFT(Stage[SFTSpec]):
    """Supervised fine-tuning on the assistant's part of each trace."""

    name = "sft"
    spec = SFTSpec
    loop = "perilune.tasks.supervised.sft"
    produces = "checkpoint"
    parallel = True
    needs_environment = False

    def describe(self, spec: SFTSpec, job: Job) -> Mapping[str, object]:
        memory = plan_memory(spec, job, model_config(job), job.resources.device)
        data = _describe_data(spec, job)
        return {**data, "traces seen": _describe_examples(spec), **training_plan(spec, job, memory)}


class Preference(Stage[PreferenceSpec]):
    """Direct preference optimization (DPO, IPO), with an alarm when chosen answers become less likely."""

    name = "preference"
    spec = PreferenceSpec
    loop = "perilune.tasks.supervised.preference"
    produces = "checkpoint"
    parallel = True
    needs_environment = False

    def describe(self, spec: PreferenceSpec, job: Job) -> Mapping[str, object]:
        memory = plan_memory(spec, job, model_config(job), job.resources.device)
        return {
            **_describe_data(spec, job),
            "pairs seen": _describe_examples(spec),
            "loss": f"{spec.loss}, beta {spec.beta:g}, the reference scored once",
            **training_plan(spec, job, memory),
        }


class RewardModelStage(Stage[RewardModelSpec]):
    """A Bradley-Terry reward model on the decoder."""

    name = "reward_model"
    spec = RewardModelSpec
    loop = "perilune.tasks.supervised.reward_model"
    produces = "reward_model"
    parallel = True
    needs_environment = False

    def describe(self, spec: RewardModelSpec, job: Job) -> Mapping[str, object]:
        memory = plan_stage_memory(
            model_config(job), token_budget=spec.token_budget, cache=CacheSettings(job.resources.device)
        )
        data = _describe_data(spec, job)
        return {**data, "pairs seen": _describe_examples(spec), **training_plan(spec, job, memory)}


def _describe_data(spec: SFTSpec | PairTrainingSpec, job: Job) -> dict[str, object]:
    """Describe the user's own files; empty for a stage that trains on another stage's output."""
    lines: dict[str, object] = {}
    for name, path in file_fields(type(spec), job.spec).items():
        from perilune.data.texts import read_training_texts
        from perilune.models.text.template_facts import recipe_tokenizer

        tokenizer = recipe_tokenizer(job.model, read_training_texts(Path(path)))
        reader = spec.reader(tokenizer, model_config(job))
        pairs = isinstance(spec, PairTrainingSpec)
        rows, held_out = reader.check(Path(path), pairs=pairs, validation=spec.validation)
        checked = (
            reader.describe() if rows <= reader.rows else f"{rows:,} rows; the first {reader.describe()}"
        )
        trained = max(1, rows - rows * held_out // reader.rows)
        epochs = spec.steps * spec.batch_size / trained
        split = f"{held_out:,} of {reader.rows:,} rows held out; {epochs:,.1f} epochs of the rest"
        lines[name] = f"{Path(path).name}: {checked}; {split if held_out else f'{epochs:,.1f} epochs'}"
        for warning in reader.warnings():
            lines[f"{name} warning"] = warning
    return lines


def _describe_examples(spec: SFTSpec | PairTrainingSpec) -> str:
    return f"{plural(spec.steps, 'step')} x {spec.batch_size} = {spec.steps * spec.batch_size:,}"


sft = SFT()
preference = Preference()
reward_model = RewardModelStage()
