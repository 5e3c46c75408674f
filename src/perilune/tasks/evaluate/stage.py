"""evaluate: pass@k of a checkpoint on held-out tasks, with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from perilune.bundle.job import Job
from perilune.bundle.plugin import Consumes
from perilune.frozen import Frozen
from perilune.plural import plural
from perilune.tasks.stage.bounds import MAX_SAMPLES, MAX_TASKS
from perilune.tasks.stage.custom_metrics import CustomMetrics, CustomMetricsField
from perilune.tasks.stage.memory_plan import model_config, plan_sampling_memory, planned_episode_tokens
from perilune.tasks.stage.sampling import (
    EngineField,
    RecordingSpec,
    ServerSpec,
    check_server,
    check_server_temperature,
)
from perilune.tasks.stage.stage import Stage

if TYPE_CHECKING:
    from perilune.engine.request import SamplingParams


class SamplingOptions(Frozen):
    """The tokens that an evaluation samples from."""

    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="sample from the smallest set of likeliest tokens with at least this total"
        " probability; 1: all",
    )
    top_k: int = Field(0, ge=0, description="sample from this many of the likeliest tokens; 0: all")
    min_p: float = Field(
        0.0,
        ge=0,
        le=1,
        description="sample from tokens with at least this share of the likeliest token's probability; 0:"
        " all",
    )


class EvaluateSpec(RecordingSpec):
    """Fields of an evaluate stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(
        description="stage whose checkpoint to evaluate"
    )
    tasks: int = Field(128, ge=1, le=MAX_TASKS, description="held-out tasks")
    samples: int = Field(
        8, ge=1, le=MAX_SAMPLES, description="samples per task; pass@k is computed for k up to this number"
    )
    sampling: SamplingOptions = Field(
        SamplingOptions(), description="restricts sampling to likely tokens, as model cards recommend"
    )
    sub_agent_checkpoint: Annotated[str | None, Consumes("checkpoint")] = Field(
        None, description="stage whose checkpoint samples the turns of sub-agents; null: that of `checkpoint`"
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="precision of matrix products; on a GPU, bfloat16 is faster"
    )
    metrics: CustomMetricsField = Field({}, description="metrics of your own by name, each a function")
    system: str = Field("", description="system message before each task; empty: none")
    engine: EngineField = Field(
        None,
        description="sampling engine: openvino, or a server that has the weights already, so that only"
        " the tokenizer of `checkpoint` is used; null: Perilune's own engine",
    )

    @model_validator(mode="after")
    def _check_temperature(self) -> EvaluateSpec:
        check_server_temperature(self.engine, self.temperature)
        return self

    def params(self, stop_token_ids: tuple[int, ...], *, greedy: bool = False) -> SamplingParams:
        return replace(super().params(stop_token_ids, greedy=greedy), **self.sampling.model_dump())


class Evaluate(Stage[EvaluateSpec]):
    """Evaluates a checkpoint on held-out tasks, which are the same for all checkpoints of a recipe."""

    name = "evaluate"
    spec = EvaluateSpec
    loop = "perilune.tasks.evaluate.evaluation"
    produces = "evaluation"
    output = "artifacts/summary.json"

    def describe(self, spec: EvaluateSpec, job: Job) -> Mapping[str, object]:
        CustomMetrics(spec.metrics)  # refuses functions that cannot be loaded
        server = spec.engine if isinstance(spec.engine, ServerSpec) else None
        config = None if server else model_config(job)
        longest = planned_episode_tokens(job.environment, spec.max_tokens, config)
        if server is not None:
            check_server(server, job)
            needs: dict[str, object] = {"engine": server.url}
        else:
            answers = spec.tasks * spec.samples
            needs = {"memory": plan_sampling_memory(job, spec.max_tokens, answers, spec.precision)}
        return {
            "answers": f"{plural(spec.tasks, 'held-out task')} x"
            f" ({plural(spec.samples, 'sample')} + 1 greedy) = {spec.tasks * (spec.samples + 1):,}",
            "tokens at most": f"{spec.tasks * (spec.samples + 1) * longest:,}",
            **needs,
        }


plugin = Evaluate()
