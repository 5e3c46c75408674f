"""The stages that make training data: collect, rejection_sampling, pairs."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from perilune.bundle.job import Job
from perilune.bundle.plugin import Consumes
from perilune.data.leaks import PHRASES
from perilune.environments.core.protocol import Environment
from perilune.environments.core.registry import make_environment
from perilune.errors import RequestError
from perilune.extensions import CodeFile, CodeReference
from perilune.frozen import Frozen
from perilune.tasks.stage.bounds import MAX_SAMPLES, MAX_TASKS
from perilune.tasks.stage.memory_plan import plan_sampling_memory
from perilune.tasks.stage.sampling import SamplingSpec
from perilune.tasks.stage.stage import Stage


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
        {}, description="system messages by strategy; each precedes the prompt in the traces of that strategy"
    )
    traces: int = Field(20_000, ge=1, le=10_000_000, description="verified traces to make")


class RejectionSamplingSpec(SamplingSpec):
    """Fields of a rejection_sampling stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(description="stage whose checkpoint samples")
    system: str = Field("", description="system message while sampling; the traces don't contain it")
    tasks: int = Field(1024, ge=1, le=MAX_TASKS, description="training tasks to answer")
    samples: int = Field(
        4,
        ge=1,
        le=MAX_SAMPLES,
        description="answers per task; of the right ones, the one with the highest mean log-prob is kept",
    )
    ngram: int = Field(
        8,
        ge=2,
        description="an answer that copies this many consecutive characters from `system`, spaces not"
        " counted, is a leak and is dropped",
    )
    phrases: tuple[str, ...] = Field(
        PHRASES,
        description="phrases about instructions; with `system`, an answer that has one of them is a leak too",
    )
    min_logprob: float | None = Field(
        None,
        lt=0,
        description="answers are dropped if a token has a lower log-prob without `system`, in nats; null:"
        " no limit",
    )


class PairsSpec(SamplingSpec):
    """Fields of a pairs stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(description="stage whose checkpoint samples")
    tasks: int = Field(512, ge=1, le=MAX_TASKS, description="training tasks to answer")
    skip: int = Field(0, ge=0, description="training tasks to skip first")
    samples: int = Field(8, ge=2, le=MAX_SAMPLES, description="answers per task")
    pairs_per_task: int = Field(1, ge=1, description="maximum pairs of one task; an answer is in at most one")
    gap: float = Field(0.5, gt=0, description="minimum difference between the rewards of a pair")
    most_alike: float = Field(
        1.0, gt=0, le=1, description="maximum share of characters that the two texts of a pair have in common"
    )
    length_gap: int | None = Field(
        None,
        ge=0,
        description="maximum difference between the lengths of a pair's answers, in tokens; null: no limit",
    )


class Collect(Stage[CollectSpec]):
    """A teacher writes traces, and those that pass the verifier become training data."""

    name = "collect"
    spec = CollectSpec
    loop = "perilune.tasks.datasets.collect"
    produces = "dataset"
    output = "artifacts/traces"

    def describe(self, spec: CollectSpec, job: Job) -> Mapping[str, object]:
        """Return the number of traces, and the teacher.

        Raises:
            RequestError: when `system` names an unknown strategy.
        """
        from perilune.data.generators.registry import make_teacher

        teacher = make_teacher(spec.teacher, spec.strategies, spec.options)
        for name in spec.system:
            if name not in teacher.shares:
                raise RequestError(
                    f"the teacher has no strategy '{name}'",
                    where=f"system.{name}",
                    remedy=f"one of: {', '.join(teacher.shares)}",
                )
        mix = ", ".join(f"{share:.0%} {name}" for name, share in teacher.shares.items())
        return {
            "traces": f"{spec.traces:,} verified, one per task, from the training split",
            "teacher": f"{teacher.name} ({mix})" if mix else teacher.name,
        }


class RejectionSampling(Stage[RejectionSamplingSpec]):
    """A checkpoint samples traces, and those that pass the verifier become training data."""

    name = "rejection_sampling"
    spec = RejectionSamplingSpec
    loop = "perilune.tasks.datasets.rejection_sampling"
    produces = "dataset"
    output = "artifacts/traces"

    def describe(self, spec: RejectionSamplingSpec, job: Job) -> Mapping[str, object]:
        answers = spec.tasks * spec.samples
        system = f" with system message {spec.system[:40]!r}" if spec.system else ""
        return {
            "answers": f"{spec.tasks} training tasks x {spec.samples} = {answers:,}{system}",
            "memory": plan_sampling_memory(job, spec.max_tokens, answers),
        }


class Pairs(Stage[PairsSpec]):
    """A checkpoint samples answers, and pairs with different rewards become a preference dataset."""

    name = "pairs"
    spec = PairsSpec
    loop = "perilune.tasks.datasets.pairs"
    produces = "preferences"
    output = "artifacts/pairs"

    def describe(self, spec: PairsSpec, job: Job) -> Mapping[str, object]:
        require_single_turn(make_environment(job.environment))
        answers = spec.tasks * spec.samples
        return {
            "answers": f"{spec.tasks} training tasks x {spec.samples} = {answers:,}",
            "pairs at most": f"{spec.tasks * min(spec.pairs_per_task, spec.samples // 2):,}",
            "memory": plan_sampling_memory(job, spec.max_tokens, answers),
        }


def require_single_turn(environment: Environment) -> None:
    """Refuse an environment whose answers cannot be paired.

    Raises:
        RequestError: when it has several turns.
    """
    if getattr(environment, "max_turns", 1) > 1:
        message = f"a pair is two answers to one prompt, and {environment.id} has several turns"
        raise RequestError(message, where="environment", remedy="train on its rewards with rl")


collect = Collect()
rejection_sampling = RejectionSampling()
pairs = Pairs()
