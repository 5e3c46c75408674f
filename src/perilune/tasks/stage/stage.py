"""The base class of stage plugins: it validates the spec, then plans or runs the stage."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel

from perilune.bundle.job import Job, OutputKind
from perilune.bundle.plugin import complete_spec
from perilune.bundle.workspace import Workspace
from perilune.learn.training_settings import (
    LearnerSettings,
    OptimizerSettings,
    check_can_shard,
    check_sharding_torch,
)
from perilune.tasks.stage.defaults import Default, ForgettingSpec, ModelDefaults, is_pretrained
from perilune.tasks.stage.evaluation_settings import EvaluatedSpec
from perilune.tasks.stage.memory_plan import StageMemory, model_config
from perilune.tasks.stage.new_tokenizer import require_data
from perilune.tasks.stage.retention import TrainingSpec, describe_retention

LR_WARNING_FACTOR = 50.0  # factor by which a learning rate may differ from the default without a warning

Spec = TypeVar("Spec", bound=BaseModel)


class Stage(ABC, Generic[Spec]):
    """A stage plugin (`perilune.bundle.plugin.TaskPlugin`) with a typed spec.

    Subclasses implement `describe`, and either name their `loop` or implement `execute`. Their modules stay
    light: only the loop imports torch.

    Attributes:
        name: the value of `task` in a recipe.
        loop: the module whose `run(workspace, spec)` runs the stage and returns its summary.
        produces: the kind of output, which other stages can consume.
        output: path of the output in the bundle.
        parallel: several processes may run the stage together.
        standalone: the stage needs neither the recipe's model nor its environment.
        needs_environment: the stage cannot run without the recipe's environment.
    """

    name: str
    spec: type[Spec]
    loop: str
    produces: OutputKind
    output: str = "artifacts/checkpoints/final"
    parallel: bool = False
    standalone: bool = False
    needs_environment: bool = True

    def plan(self, job: Job) -> Mapping[str, object]:
        """Validate the spec and return the plan: printable values by name.

        Raises:
            RequestError: when the settings contradict each other or the job's model or environment.
        """
        spec = read_spec(self.spec, job)
        require_data(job)
        if isinstance(spec, LearnerSettings):
            _check_sharding(spec, job)
        return {**self.describe(spec, job), **describe_defaults(spec, job)}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Validate the spec, run the stage, and return its summary."""
        job = use_bundled_model(workspace)
        spec = read_spec(self.spec, job)
        if isinstance(spec, OptimizerSettings):
            workspace.log(f"learning rate: {_describe_learning_rate(spec, job)}")
            if warning := _lr_warning(spec, job):
                workspace.log(f"warning: {warning}")
        for name, line in describe_defaults(spec, job).items():
            workspace.log(f"{name}: {line}")
        return self.execute(spec, workspace)

    @abstractmethod
    def describe(self, spec: Spec, job: Job) -> Mapping[str, object]:
        """Return the plan of the stage: printable values by name."""

    def execute(self, spec: Spec, workspace: Workspace) -> dict[str, Any]:
        return cast(dict[str, Any], import_module(self.loop).run(workspace, spec))


def _check_sharding(settings: LearnerSettings, job: Job) -> None:
    """Check that sharding is possible if the job requests it or gets it by default.

    The run uses the same version of torch as this process.

    Raises:
        RequestError: when the model or the installed torch cannot be sharded.
    """
    resources, adapter = job.resources, settings.lora is not None
    if resources.sharded:
        check_can_shard(adapter=adapter, experts=_has_experts(job))
    by_default = resources.device == "cuda" and resources.processes * resources.nodes > 1
    can_shard = not adapter and not (by_default and _has_experts(job))
    if resources.sharded or (resources.sharded is None and by_default and can_shard):
        check_sharding_torch()


def _has_experts(job: Job) -> bool:
    return model_config(job).experts is not None


def read_spec(kind: type[Spec], job: Job) -> Spec:
    """Validate the job's spec, with the defaults that depend on the model."""
    return kind.model_validate(complete_spec(kind, job.task, job.spec, job.model, job.resources.device))


def use_bundled_model(workspace: Workspace) -> Job:
    """Return the job with the model's path in the bundle: the recipe's weights, or the stage's checkpoint.

    The path in the recipe exists only on the machine that submitted the run.
    """
    job = workspace.job
    for name in ("model", "checkpoint"):
        if job.model.get("path") and workspace.has_input(name):
            return job.model_copy(update={"model": {**job.model, "path": str(workspace.input(name))}})
    return job


def describe_defaults(spec: BaseModel, job: Job) -> dict[str, str]:
    """Describe the fields whose default depends on a pretrained model; `lr` is described separately."""
    if not isinstance(spec, ModelDefaults) or not is_pretrained(job.model):
        return {}
    defaults = defaults_of(spec, job)
    lines = {
        name: f"{getattr(spec, name):g}; {_default_reason(name, spec, defaults)}"
        for name in defaults
        if name not in ("lr", "forgetting")
    }
    if isinstance(spec, ForgettingSpec) and spec.forgetting:
        default = defaults["forgetting"]
        chosen = spec.forgetting.model_dump(mode="json")
        reason = default.reason if chosen == default.value else "set in the recipe"
        lines["forgetting"] = f"{spec.forgetting.describe(job.environment)}; {reason}"
    return lines


def defaults_of(spec: ModelDefaults, job: Job) -> dict[str, Default]:
    """Return the defaults of a stage's fields that depend on the model and the device."""
    return spec.defaults(job.task, job.spec, job.model, job.resources.device)


def _default_reason(name: str, spec: BaseModel, defaults: Mapping[str, Default]) -> str:
    """Return the reason for a field's value: that of the default, or the recipe."""
    default = defaults[name]
    return default.reason if getattr(spec, name) == default.value else "set in the recipe"


def training_plan(spec: OptimizerSettings, job: Job, memory: StageMemory) -> dict[str, object]:
    """Return the last lines of a training stage's plan: learning rate, checkpoints, adapter, memory."""
    return {
        "learning rate": _describe_learning_rate(spec, job),
        **({"warning": warning} if (warning := _lr_warning(spec, job)) else {}),
        "checkpoints": describe_retention(cast(TrainingSpec, spec), memory),
        **_describe_evaluation(spec, job),
        **(spec.describe_learning() if isinstance(spec, LearnerSettings) else {}),
        "memory": memory,
    }


def _describe_evaluation(spec: BaseModel, job: Job) -> dict[str, str]:
    return spec.describe_evaluation(job) if isinstance(spec, EvaluatedSpec) else {}


def _lr_warning(spec: OptimizerSettings, job: Job) -> str:
    """Return a warning if the learning rate is far from the default for this task and model, else ""."""
    default = defaults_of(cast(ModelDefaults, spec), job)["lr"].value
    if not default or default / LR_WARNING_FACTOR <= spec.peak_lr <= default * LR_WARNING_FACTOR:
        return ""
    far = spec.peak_lr / default
    effect = (
        "AdamW moves every weight by up to lr in each step, which may destroy the policy"
        if far > 1
        else "the policy may hardly change"
    )
    times = f"{far:,.0f} times" if far > 1 else f"1/{1 / far:,.0f} of"
    return f"lr {spec.peak_lr:g} is {times} the default of {default:g} for this task and model: {effect}"


def _describe_learning_rate(spec: OptimizerSettings, job: Job) -> str:
    """Return the schedule, with the reason for its peak rate."""
    defaults = defaults_of(cast(ModelDefaults, spec), job)
    steps = cast(TrainingSpec, spec).steps * getattr(spec, "updates", 1)
    return f"{spec.describe_schedule(steps)}; {_default_reason('lr', spec, defaults)}"
