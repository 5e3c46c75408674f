"""The typed recipe, with every default filled in.

Task plugins define the keys of stages, and environments the keys of their sections. All others are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from perilune.bundle.job import PRESET, Job, Preset, Resources
from perilune.bundle.plugin import (
    complete_spec,
    load_plugin,
    plugin_names,
    resources_of,
    uses_environment,
    uses_model,
)
from perilune.frozen import Frozen
from perilune.tracking.sinks import SinkName

MODEL = "model"  # reserved stage name: the model section of the recipe
VERIFIER = "verifier"  # reserved reward name: the environment's own verifier
NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9_-]{0,63}$"


class ModelSpec(Frozen):
    """The model that training starts from: a new one by `preset`, or weights at `path`.

    In a loaded recipe, `path` is an absolute folder, `chat_template` is the text of the template, and
    `tokenizer` and `vocab_size` are filled in.
    """

    preset: Preset | None = Field(None, description=PRESET)
    path: str | None = Field(
        None, description="Hugging Face folder, GGUF file, fetched model, or id of a model in the local cache"
    )
    tokenizer: Literal["characters", "bytes", "bpe"] | None = Field(
        None,
        description="tokenizer of a new model. characters: printable ASCII; bytes: any text; bpe: any"
        " text, trained on the `data` of the stage that makes the model. Default: characters,"
        " or bytes if a text of the recipe has characters other than printable ASCII",
    )
    vocab_size: int | None = Field(
        None, ge=512, le=16384, description="maximum tokens of `tokenizer: bpe`. Default: 2048"
    )
    chat_template: str | None = Field(None, description="Jinja file that replaces the model's own template")
    chat_template_kwargs: dict[str, bool | int | float | str | None] = Field(
        {}, description="values of the chat template's variables, such as `enable_thinking: false`"
    )

    @model_validator(mode="after")
    def _one_source(self) -> ModelSpec:
        if self.preset is None and self.path is None:
            raise ValueError("needs exactly one of preset and path")
        if self.preset is not None and self.path is not None:
            raise ValueError("needs exactly one of preset and path; --set model.preset=null unsets preset")
        if self.tokenizer is not None and self.preset is None:
            raise ValueError("tokenizer is for a new model; a model at a path has its own")
        if self.vocab_size is not None and self.tokenizer != "bpe":
            raise ValueError("vocab_size is for tokenizer: bpe; the others have a fixed number of tokens")
        return self


class RewardFunction(Frozen):
    """A reward function as in TRL: `def f(prompts, completions, **columns) -> list[float | None]`.

    In a loaded recipe, `source` is the text of the file that `function` names.
    """

    function: str = Field(
        pattern=r"^([^:]+:)?[A-Za-z_]\w*$",
        description="file.py:name, or an installed function: module:name, or the name of an entry point",
    )
    weight: float = Field(1.0, allow_inf_nan=False, description="weight of this reward in the sum")
    format: Literal["messages", "text"] = Field(
        "messages", description="what the function receives: lists of messages, or plain text"
    )
    source: str | None = Field(
        None, description="source of the function; filled in when the recipe is loaded"
    )


Weight = Annotated[float, Field(allow_inf_nan=False)]


class Stage(Frozen):
    """One step of a recipe.

    Attributes:
        name: unique within the recipe.
        spec: the keys of the task plugin, with every default filled in.
        environment: in a loaded recipe, the whole section; empty if the stage uses the recipe's.
        consumes: for keys of `spec`, the stage whose output the key takes ("model": the model section).
    """

    name: str = Field(pattern=NAME_PATTERN, description="name of the stage; other stages refer to it")
    task: str = Field(description="kind of stage; its keys are listed below")
    environment: dict[str, Any] = Field(
        {},
        description="keys of the recipe's `environment` that have another value in this stage; with `id`,"
        " the section of a whole other environment",
    )
    spec: dict[str, Any] = Field(default_factory=dict)
    consumes: dict[str, str] = Field(default_factory=dict)


class Recipe(Frozen):
    """A validated recipe. Each stage follows the stages that it consumes."""

    name: str = Field(pattern=NAME_PATTERN, description="name of the experiment")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of every random number")
    model: ModelSpec | None = Field(
        None, description="the model that training starts from; needed by all tasks that use a language model"
    )
    environment: dict[str, Any] = Field(
        {},
        description="source of tasks and scores; needed by all tasks that use a language model, except those"
        " that only train on data (sft, preference, reward_model)",
    )
    rewards: dict[str, Weight | RewardFunction] = Field(
        {},
        description="terms of the reward by name: the weight of `verifier` (the verifier's score) or of a"
        " term of the environment, or a reward function; terms that are not listed are"
        " ignored. See how-to/reward-functions.md",
    )
    resources: Resources = Field(
        Resources(), description="device, threads, processes and machines of the stages"
    )
    secrets: tuple[str, ...] = Field((), description="names of secrets that stages receive; never values")
    tracking: tuple[SinkName, ...] = Field(
        (), description="trackers that metrics are copied to while stages run"
    )
    stages: tuple[Stage, ...] = Field(
        min_length=1,
        description="the stages to run; a stage runs after those whose output it takes, wherever they are"
        " in the list",
    )

    @field_validator("resources")
    @classmethod
    def _sharding_needs_processes(cls, resources: Resources) -> Resources:
        if resources.sharded and resources.processes * resources.nodes == 1:
            raise ValueError("sharded needs more than one process; set processes or nodes")
        return resources

    @model_validator(mode="after")
    def _has_model_and_environment(self) -> Recipe:
        tasks = {stage.task for stage in self.stages} & set(plugin_names())
        for name, is_used in (("model", uses_model), ("environment", uses_environment)):
            is_missing = name not in self.model_fields_set or getattr(self, name) is None
            if is_missing and any(is_used(load_plugin(task)) for task in tasks):
                raise ValueError(f"{name} is missing")
        return self

    def stage(self, name: str) -> Stage:
        """Return the stage called `name`.

        Raises:
            KeyError: when no stage has that name.
        """
        return {stage.name: stage for stage in self.stages}[name]


def add_rewards(
    environment: Mapping[str, Any], rewards: Mapping[str, float | RewardFunction]
) -> dict[str, Any]:
    """Return the environment section of a job: with the rewards, if there are any."""
    dumped = {name: term.model_dump() for name, term in rewards.items() if isinstance(term, RewardFunction)}
    return {**environment, "rewards": {**rewards, **dumped}} if rewards else dict(environment)


def _model_section(recipe: Recipe, stage: Stage) -> dict[str, Any]:
    """Return the model section of a stage's job, with the preset of the model from which training started."""
    if recipe.model is None:
        return {}
    model = recipe.model.model_dump()
    while "checkpoint" in stage.consumes and stage.consumes["checkpoint"] != MODEL:
        stage = recipe.stage(stage.consumes["checkpoint"])
    preset = stage.spec.get("preset") if recipe.model.preset else None
    return model if preset is None else {**model, "preset": preset}


def build_job(recipe: Recipe, stage: Stage) -> Job:
    """Build the job of one stage, without inputs: they exist once the consumed stages have finished."""
    model = _model_section(recipe, stage)
    plugin = load_plugin(stage.task)
    resources = resources_of(plugin, recipe.resources)
    return Job(
        task=stage.task,
        stage=stage.name,
        spec=complete_spec(plugin.spec, stage.task, stage.spec, model, resources.device),
        model=model,
        environment=add_rewards(stage.environment or recipe.environment, recipe.rewards),
        seed=recipe.seed,
        resources=resources,
        secrets=recipe.secrets,
    )
