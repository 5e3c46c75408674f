"""The stages that make training data: collect, rejection_sampling, pairs."""

from collections.abc import Mapping

from perilune.bundle.job import Job
from perilune.errors import RequestError
from perilune.tasks.datasets.specs import CollectSpec, PairsSpec, RejectionSamplingSpec
from perilune.tasks.stage.memory_plan import plan_sampling_memory
from perilune.tasks.stage.stage import Stage


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
        answers = spec.tasks * spec.samples
        return {
            "answers": f"{spec.tasks} training tasks x {spec.samples} = {answers:,}",
            "pairs at most": f"{spec.tasks * min(spec.pairs_per_task, spec.samples // 2):,}",
            "memory": plan_sampling_memory(job, spec.max_tokens, answers),
        }


collect = Collect()
rejection_sampling = RejectionSampling()
pairs = Pairs()
