"""The fields of an evaluate stage."""

from typing import Annotated, Literal

from pydantic import Field

from perilune.bundle.plugin import Consumes
from perilune.tasks.stage.own_metrics import OwnMetricsField
from perilune.tasks.stage.sampling import EngineField, RecordingSpec


class EvaluateSpec(RecordingSpec):
    """Fields of an evaluate stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(
        description="stage whose checkpoint to evaluate"
    )
    tasks: int = Field(128, ge=1, le=1_000_000, description="held-out tasks")
    samples: int = Field(8, ge=1, le=4096, description="samples per task, for pass@k up to this k")
    sub_agent_checkpoint: Annotated[str | None, Consumes("checkpoint")] = Field(
        None, description="stage whose checkpoint samples the turns of sub-agents; null: the same checkpoint"
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="precision of matrix products; that of training saves time on a GPU"
    )
    metrics: OwnMetricsField = Field({}, description="metrics of your own by name, each a function")
    system: str = Field("", description="system message before each task; empty: none")
    engine: EngineField = Field(
        None,
        description="sampling engine: openvino, or a server with the weights, for which the checkpoint gives"
        " only the tokenizer; null: Perilune's own engine",
    )
