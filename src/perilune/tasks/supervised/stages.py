"""The stages that train on data: sft, preference, reward_model."""

from collections.abc import Mapping
from pathlib import Path

from perilune.bundle.job import Job
from perilune.bundle.plugin import file_fields
from perilune.plural import plural
from perilune.tasks.stage.memory_plan import CacheSettings, model_config, plan_stage_memory
from perilune.tasks.stage.stage import Stage, training_plan
from perilune.tasks.supervised.specs import (
    PairTrainingSpec,
    PreferenceSpec,
    RewardModelSpec,
    SFTSpec,
    plan_memory,
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
