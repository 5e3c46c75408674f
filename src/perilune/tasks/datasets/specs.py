"""The fields of the stages that make training data: collect, rejection_sampling, pairs."""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from perilune.bundle.plugin import Consumes
from perilune.data.leaks import PHRASES
from perilune.extensions import CodeFile, CodeReference
from perilune.frozen import Frozen
from perilune.tasks.stage.sampling import SamplingSpec


class CollectSpec(Frozen):
    """Fields of a collect stage."""

    teacher: Annotated[str | CodeFile, CodeReference(), WithJsonSchema({"type": "string"})] = Field(
        description="teacher that writes candidate traces: a name, or file.py:name"
    )
    strategies: dict[str, float] = Field(
        {}, description="share of each strategy; empty: the teacher's defaults"
    )
    options: dict[str, Any] = Field({}, description="further options of the teacher, by name")
    system: dict[str, str] = Field(
        {}, description="system message before the traces of a strategy, by the strategy's name"
    )
    traces: int = Field(20_000, ge=1, le=10_000_000, description="verified traces to make")


class RejectionSamplingSpec(SamplingSpec):
    """Fields of a rejection_sampling stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(description="stage whose checkpoint samples")
    system: str = Field("", description="system message while sampling; the traces don't contain it")
    tasks: int = Field(1024, ge=1, description="training tasks to answer")
    samples: int = Field(4, ge=1, description="answers per task; the most likely right one is kept")
    ngram: int = Field(8, ge=2, description="consecutive characters copied from `system` that make a leak")
    phrases: tuple[str, ...] = Field(PHRASES, description="phrases about instructions that make a leak too")
    min_logprob: float | None = Field(
        None,
        lt=0,
        description="lowest log-prob in nats that a token may have without `system`; null: no limit",
    )


class PairsSpec(SamplingSpec):
    """Fields of a pairs stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(description="stage whose checkpoint samples")
    tasks: int = Field(512, ge=1, description="training tasks to answer")
    skip: int = Field(0, ge=0, description="training tasks to skip first")
    samples: int = Field(8, ge=2, description="answers per task")
    pairs_per_task: int = Field(1, ge=1, description="maximum pairs of one task; an answer is in at most one")
    gap: float = Field(0.5, gt=0, description="smallest difference of rewards in a pair")
    most_alike: float = Field(
        1.0, gt=0, le=1, description="largest share of characters that the texts of a pair may have in common"
    )
    length_gap: int | None = Field(
        None, ge=0, description="largest difference of lengths in a pair, in tokens; null: no limit"
    )
