"""collect: make verified training traces; what the verifier refuses is counted and set aside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from perilune.bundle.job import Frozen, Job
from perilune.errors import RequestError, WorkFailedError
from perilune.tasks.distill.hints import hinted

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace
    from perilune.data.generators.teacher import Candidate

MOST_REASONS = 20  # told in the summary; all are in rejected.jsonl


class CollectSpec(Frozen):
    """Fields of a collect stage."""

    teacher: str = Field(description="who writes candidate traces")
    strategies: dict[str, float] = Field({}, description="share of each strategy; empty: the teacher's own")
    options: dict[str, Any] = Field({}, description="what else the teacher takes, by name")
    system: dict[str, str] = Field(
        {}, description="system message before the traces of a strategy, by its name; none: no message"
    )
    traces: int = Field(20_000, ge=1, le=10_000_000, description="verified traces to make")


class Collect:
    """A teacher writes, the verifier judges, and only what passes becomes training data."""

    name = "collect"
    spec = CollectSpec
    produces = "dataset"
    output = "artifacts/traces"

    def plan(self, job: Job) -> Mapping[str, object]:
        """What will be written, by which teacher."""
        from perilune.data.generators.registry import make_teacher

        spec = CollectSpec.model_validate(job.spec)
        teacher = make_teacher(spec.teacher, spec.strategies, spec.options)
        for name in spec.system:
            if name not in teacher.shares:
                raise RequestError(
                    f"no traces are made by the strategy '{name}'",
                    where=f"system.{name}",
                    remedy=f"one of: {', '.join(teacher.shares)}",
                )
        mix = ", ".join(f"{share:.0%} {name}" for name, share in teacher.shares.items())
        return {
            "traces": f"{spec.traces:,} verified, one a task, from the training split",
            "teacher": f"{teacher.name} ({mix})" if mix else teacher.name,
        }

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Teach, verify, write."""
        from functools import partial
        from itertools import islice
        from time import perf_counter

        from perilune.data.generators.gathering import gather
        from perilune.data.generators.registry import make_teacher

        spec = CollectSpec.model_validate(workspace.job.spec)
        begun = perf_counter()
        workspace.rewind(-1)  # what an earlier attempt left
        found = gather(
            workspace.job.environment,
            make_teacher(spec.teacher, spec.strategies, spec.options),
            spec.traces,
            workspace.job.seed,
            told={"system": spec.system, "options": spec.options},
            prepare=partial(under_system, system=spec.system),
            show=lambda kept, rejected: workspace.progress(kept, spec.traces, "traces", rejected=rejected),
        )
        found.write(workspace.root / self.output)
        kept = found.kept
        if len(kept) < spec.traces:
            raise WorkFailedError(
                f"{len(kept)} of {spec.traces} traces passed the verifier ({found.told()})",
                where=f"stage {workspace.job.stage}",
                remedy=f"look at {self.output}/rejected.jsonl in the run's directory; ask for fewer traces,"
                " widen the environment's config, or take another teacher",
            )
        counts = {f"source/{name}": count for name, count in found.sources.items()}
        workspace.metric(0, rows=len(kept), rejected=len(found.rejected), **counts)
        for record in islice(kept, 3):
            workspace.log(f"{record.source}: {''.join(message['content'] for message in record.messages)}")
        return {
            "kind": "dataset",
            "rows": len(kept),
            "rejected": len(found.rejected),
            "reasons": dict(found.reasons.most_common(MOST_REASONS)),
            "sources": dict(found.sources),
            "environment": found.environment,
            "seconds": perf_counter() - begun,
        }


def under_system(candidates: Iterable[Candidate], system: Mapping[str, str]) -> Iterator[Candidate]:
    """The candidates, each prompt after the system message of its strategy if that has one."""
    for one in candidates:
        strategy = one.source.rpartition("/")[2]
        (task,) = hinted([one.task], system.get(strategy, ""))
        yield replace(one, task=task)


plugin = Collect()
