"""The fields of the stages that make training data: collect, rejection_sampling, pairs."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from perilune.bundle.job import Frozen
from perilune.bundle.plugin import Consumes
from perilune.data.leaks import PHRASES
from perilune.tasks.stage.sampling import SamplingSpec


class CollectSpec(Frozen):
    """Fields of a collect stage."""

    teacher: str = Field(description="who writes candidate traces")
    strategies: dict[str, float] = Field({}, description="share of each strategy; empty: the teacher's own")
    options: dict[str, Any] = Field({}, description="what else the teacher takes, by name")
    system: dict[str, str] = Field(
        {}, description="system message before the traces of a strategy, by its name; none: no message"
    )
    traces: int = Field(20_000, ge=1, le=10_000_000, description="verified traces to make")


class RejectionSamplingSpec(SamplingSpec):
    """Fields of a rejection_sampling stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(description="stage whose checkpoint writes")
    system: str = Field("", description="system message it writes under; the traces are without it")
    tasks: int = Field(1024, ge=1, description="training tasks to answer")
    samples: int = Field(4, ge=1, description="answers a task, of which the likeliest right one is kept")
    ngram: int = Field(8, ge=2, description="characters in a row, copied from `system`, that are a leak")
    phrases: tuple[str, ...] = Field(PHRASES, description="what speaks of instructions, and is a leak too")
    min_logprob: float | None = Field(
        None, lt=0, description="nats that no token may be below, to the model without `system`; null: any"
    )


class PairsSpec(SamplingSpec):
    """Fields of a pairs stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(description="whose answers are compared")
    tasks: int = Field(512, ge=1, description="training tasks to answer")
    skip: int = Field(0, ge=0, description="training tasks passed over before those")
    samples: int = Field(8, ge=2, description="answers a task")
    pairs_per_task: int = Field(1, ge=1, description="most pairs of one task; an answer is in one at most")
    gap: float = Field(0.5, gt=0, description="smallest difference of rewards in a pair")
    most_alike: float = Field(
        1.0, gt=0, le=1, description="pairs whose texts share more than this of their characters are left out"
    )
    length_gap: int | None = Field(
        None, ge=0, description="pairs whose lengths differ by more tokens are left out; null keeps all"
    )
