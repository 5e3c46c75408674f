"""The base class of stage plugins: it validates the spec, then plans or runs the stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from pydantic import BaseModel

from perilune.bundle.job import Job
from perilune.bundle.plugin import OutputKind
from perilune.learn.learning_rates import default_lr, with_default_lr
from perilune.learn.training_settings import LearnerSettings, OptimizerSettings
from perilune.tasks.stage.retention import TrainingSpec, describe_retention

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace
    from perilune.tasks.stage.memory_plan import StageMemory

Spec = TypeVar("Spec", bound=BaseModel)


class Stage(ABC, Generic[Spec]):
    """A stage plugin (`perilune.bundle.plugin.TaskPlugin`) with a typed spec.

    Subclasses implement `describe` and `execute`. Their modules stay light: `execute` imports the stage's
    loop, and the loop imports torch.

    Attributes:
        parallel: several processes may run the stage together.
        standalone: the stage needs neither the recipe's model nor its environment.
    """

    name: str
    spec: type[Spec]
    produces: OutputKind
    output: str = "artifacts/checkpoints/final"
    parallel: bool = False
    standalone: bool = False

    def plan(self, job: Job) -> Mapping[str, object]:
        """Validate the spec and describe the work: name to printable value.

        Raises:
            RequestError: when the settings contradict each other or the job's model or environment.
        """
        return self.describe(read_spec(self.spec, job), job)

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Validate the spec, run the stage, and return its summary."""
        return self.execute(read_spec(self.spec, workspace.job, workspace.log), workspace)

    @abstractmethod
    def describe(self, spec: Spec, job: Job) -> Mapping[str, object]:
        """Plan the stage: name to printable value."""

    @abstractmethod
    def execute(self, spec: Spec, workspace: Workspace) -> dict[str, Any]:
        """Run the stage and return its summary."""


def read_spec(kind: type[Spec], job: Job, log: Callable[[str], None] | None = None) -> Spec:
    """Validate the job's spec with the default learning rate filled in, and log why it was chosen."""
    spec = kind.model_validate(with_default_lr(job.task, job.spec, job.model))
    if log is not None and isinstance(spec, OptimizerSettings) and _lr_reason(spec, job):
        log(f"learning rate: {_describe_learning_rate(spec, job)}")
    return spec


def training_plan(spec: OptimizerSettings, job: Job, memory: StageMemory) -> dict[str, object]:
    """The last lines of a training stage's plan: learning rate, checkpoints, adapter, memory."""
    return {
        "learning rate": _describe_learning_rate(spec, job),
        "checkpoints": describe_retention(cast(TrainingSpec, spec), memory),
        **(spec.describe_learning() if isinstance(spec, LearnerSettings) else {}),
        "memory": memory,
    }


def _describe_learning_rate(spec: OptimizerSettings, job: Job) -> str:
    """The schedule, with the reason for a default rate."""
    reason = _lr_reason(spec, job)
    return spec.describe_schedule() + (f"; {reason}" if reason else "")


def _lr_reason(spec: OptimizerSettings, job: Job) -> str:
    rate, reason = default_lr(job.task, job.spec, job.model)
    return reason if spec.lr == rate else ""
