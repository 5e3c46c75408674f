"""distill: on-policy distillation; the student samples, and a teacher scores every token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from perilune.bundle.job import Job
from perilune.bundle.plugin import Consumes
from perilune.learn.training_settings import LearnerSettings
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.memory import added_by_distillation, base_bytes
from perilune.plural import plural
from perilune.tasks.stage.bounds import MAX_SAMPLES, MAX_TASKS
from perilune.tasks.stage.defaults import ForgettingSpec
from perilune.tasks.stage.evaluation_settings import EvaluatedSpec
from perilune.tasks.stage.memory_plan import CacheSettings, StageMemory, model_config, plan_stage_memory
from perilune.tasks.stage.sampling import SamplingSpec
from perilune.tasks.stage.stage import Stage, training_plan


class DistillSpec(EvaluatedSpec, LearnerSettings, SamplingSpec, ForgettingSpec):
    """Fields of a distill stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(
        description="checkpoint that the student starts from"
    )
    teacher: Annotated[str, Consumes("checkpoint")] = Field(
        description="stage whose checkpoint is the frozen teacher"
    )
    system: str = Field("", description="system message for the teacher only; empty: none")
    loss: Literal["reverse_kl", "reverse_topk", "forward_topk", "gkd"] = Field(
        "reverse_kl",
        description="divergence to minimize. reverse_kl: KL(student, teacher) at the sampled tokens, by"
        " policy gradient; reverse_topk: KL(student, teacher) on the student's k likeliest"
        " tokens; forward_topk: KL(teacher, student) on the teacher's k likeliest tokens; gkd:"
        " generalized Jensen-Shannon divergence",
    )
    k: int = Field(16, ge=1, description="number of tokens in the top-k losses and in the overlap metrics")
    beta: float = Field(
        0.5,
        ge=0,
        le=1,
        description="only for gkd: 0 is KL(teacher, student), 1 is KL(student, teacher), and values"
        " between interpolate",
    )
    coefficient: float = Field(
        1.0, gt=0, description="only for reverse_kl: weight of the advantages from the teacher"
    )
    task_reward: float = Field(
        0.0,
        ge=0,
        description="only for reverse_kl: weight of advantages from the verifier's rewards, each minus"
        " the mean of its group; 0: none",
    )
    data: Annotated[str | None, Consumes("dataset")] = Field(
        None,
        description="stage whose traces replace the student's answers in steps that are not on-policy;"
        " needs on_policy below 1",
    )
    on_policy: float = Field(
        1.0,
        ge=0,
        le=1,
        description="probability that a step trains on the student's own answers; other steps train on"
        " `data`",
    )
    steps: int = Field(100, ge=1, description="optimizer steps")
    prompts: int = Field(
        32, ge=1, le=MAX_TASKS, description="tasks per step. Default for a pretrained model: 16"
    )
    samples: int = Field(4, ge=1, le=MAX_SAMPLES, description="answers per task")
    final_lr: float = Field(
        0.1, ge=0, le=1, description="final learning rate divided by the peak; 1: no decay"
    )

    @model_validator(mode="after")
    def _check_data_and_loss(self) -> DistillSpec:
        if (self.on_policy < 1) != (self.data is not None):
            raise ValueError("on_policy below 1 needs data, and data needs on_policy below 1")
        if self.loss == "reverse_kl" and self.data is not None:
            raise ValueError(
                "reverse_kl is a policy gradient: it can only train on the student's own answers. Choose"
                " another loss, or remove data and on_policy"
            )
        if self.task_reward and (self.loss != "reverse_kl" or self.samples < 2):
            raise ValueError("task_reward needs loss: reverse_kl, and at least 2 samples to compare")
        for name, loss in (("beta", "gkd"), ("coefficient", "reverse_kl")):
            if self.loss != loss and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} needs loss: {loss}")
        return self

    def memory_plan(self, config: DecoderConfig, device: str) -> StageMemory:
        """Return the memory plan of student and teacher.

        Args:
            config: the configuration of the larger of the two models.

        Raises:
            RequestError: when the answers leave no room for a prompt.
        """
        cache = CacheSettings(device, self.precision)
        plan = plan_stage_memory(
            config,
            samples=max(self.prompts * self.samples, self.eval.tasks * self.eval.samples if self.eval else 0),
            max_tokens=self.max_tokens,
            token_budget=self.token_budget,
            reference=True,
            learner=self,
            cache=cache,
        )
        added = added_by_distillation(config, self.token_budget, cache.gpu)
        learning = plan.transient["learning"] + added
        plan = replace(plan, transient={**plan.transient, "learning": learning})
        if self.lora is None:
            return plan
        teacher = base_bytes(config, "float32")  # unlike a reference, the teacher is not the adapter's base
        return replace(plan, persistent={**plan.persistent, "reference": teacher})


class Distill(Stage[DistillSpec]):
    """On-policy distillation from a teacher with the same vocabulary, or a prompted copy of the student."""

    name = "distill"
    spec = DistillSpec
    loop = "perilune.tasks.distill.loop"
    produces = "checkpoint"
    parallel = True

    def describe(self, spec: DistillSpec, job: Job) -> Mapping[str, object]:
        memory = spec.memory_plan(model_config(job), job.resources.device)
        answers = spec.steps * spec.prompts * spec.samples
        system = f", the teacher with system message {spec.system[:40]!r}" if spec.system else ""
        tasks = f"{plural(spec.steps, 'step')} x {plural(spec.prompts, 'task')}"
        return {
            "answers": f"{tasks} x {spec.samples} = {answers:,}",
            "loss": f"{spec.loss}, {spec.on_policy:.0%} of steps on-policy{system}",
            **training_plan(spec, job, memory),
        }


plugin = Distill()
