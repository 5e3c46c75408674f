"""distill: the student answers, the teacher says of every token how likely it would have been."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from perilune.bundle.job import Job
from perilune.bundle.plugin import Consumes
from perilune.learn.training_settings import LearnerSettings
from perilune.tasks.stage.learning_rates import describe_learning_rate, read_spec
from perilune.tasks.stage.retention import Saving, planned
from perilune.tasks.stage.sampling import SamplingSpec

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace
    from perilune.models.config.decoder_config import DecoderConfig
    from perilune.tasks.stage.memory_plan import StageMemory


class DistillSpec(Saving, LearnerSettings, SamplingSpec):
    """Fields of a distill stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(description="where the student starts")
    teacher: Annotated[str, Consumes("checkpoint")] = Field(
        description="stage whose checkpoint teaches, frozen"
    )
    system: str = Field(
        "", description="system message that the teacher is shown and the student is not; empty: none"
    )
    loss: Literal["reverse_kl", "reverse_topk", "forward_topk", "gkd"] = Field(
        "reverse_kl", description="reverse_kl (policy gradient), reverse_topk, forward_topk or gkd"
    )
    k: int = Field(16, ge=1, description="tokens of the top-k losses and of the overlap figures")
    beta: float = Field(0.5, ge=0, le=1, description="of gkd: 0 is the forward KL, 1 the reverse KL")
    coefficient: float = Field(1.0, gt=0, description="of the teacher's advantages in reverse_kl")
    task_reward: float = Field(
        0.0, ge=0, description="of the verifier's, centred in the group, beside them; 0 leaves them out"
    )
    data: Annotated[str | None, Consumes("dataset")] = Field(
        None, description="stage whose traces take the place of the student's own in some steps"
    )
    on_policy: float = Field(1.0, ge=0, le=1, description="share of steps on the student's own answers")
    steps: int = Field(100, ge=1, description="optimizer steps")
    prompts: int = Field(32, ge=1, description="tasks a step")
    samples: int = Field(4, ge=1, description="answers a task")
    final_lr: float = Field(0.1, ge=0, le=1, description="last learning rate over peak; 1 is constant")

    @model_validator(mode="after")
    def _fits(self) -> DistillSpec:
        if (self.on_policy < 1) != (self.data is not None):
            raise ValueError("on_policy below 1 needs data, and data needs on_policy below 1")
        if self.loss == "reverse_kl" and self.data is not None:
            raise ValueError("reverse_kl is a policy gradient: it needs the student's own answers alone")
        if self.task_reward and (self.loss != "reverse_kl" or self.samples < 2):
            raise ValueError("task_reward needs loss: reverse_kl, and at least 2 samples to compare")
        return self


class Distill:
    """On-policy distillation, from a teacher of the same tokens, or from the student itself told more."""

    name = "distill"
    spec = DistillSpec
    produces = "checkpoint"
    output = "artifacts/checkpoints/final"
    parallel = True

    def plan(self, job: Job) -> Mapping[str, object]:
        """Answers, the loss, the schedule and memory."""
        from perilune.tasks.stage.memory_plan import model_config

        spec = read_spec(DistillSpec, job)
        memory = distill_memory(spec, model_config(job), job.resources.device)
        answers = spec.steps * spec.prompts * spec.samples
        told = f", the teacher told {spec.system[:40]!r}" if spec.system else ""
        return {
            "answers": f"{spec.steps} steps x {spec.prompts} tasks x {spec.samples} = {answers:,}",
            "loss": f"{spec.loss}, {spec.on_policy:.0%} of steps on-policy{told}",
            "learning rate": describe_learning_rate(spec, job),
            "checkpoints": planned(spec, memory),
            **spec.planned(),
            "memory": memory,
        }

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """The loop."""
        from perilune.tasks.distill.loop import run

        spec = read_spec(DistillSpec, workspace.job, workspace.log)
        return run(workspace, spec, lambda config, device: distill_memory(spec, config, device))


def distill_memory(spec: DistillSpec, config: DecoderConfig, device: str) -> StageMemory:
    """Memory of student and teacher; `config` is the larger one's.

    Raises:
        RequestError: when the answers leave no room for a prompt.
    """
    from perilune.tasks.stage.memory_plan import stage_memory

    return stage_memory(
        config,
        samples=spec.prompts * spec.samples,
        max_tokens=spec.max_tokens,
        token_budget=spec.token_budget,
        reference=True,
        learner=spec,
        device=device,
    )


plugin = Distill()
