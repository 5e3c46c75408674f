"""The work of collect: a teacher writes traces, and those that pass the verifier are kept."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any

from perilune.bundle.workspace import Workspace
from perilune.data.generators.collection import CollectedTraces, collect_traces
from perilune.data.generators.registry import make_teacher
from perilune.data.generators.teacher import Candidate
from perilune.errors import WorkFailedError
from perilune.tasks.datasets.stages import CollectSpec
from perilune.tasks.stage.system_message import add_system_message

OUTPUT = "artifacts/traces"
MOST_REASONS = 20  # reasons in the summary; rejected.jsonl has all of them


def run(workspace: Workspace, spec: CollectSpec) -> dict[str, Any]:
    """Generate and verify traces; return the summary."""
    start = perf_counter()
    workspace.rewind(-1)  # removes the metrics of an earlier attempt
    collected = collect_traces(
        workspace.job.environment,
        make_teacher(spec.teacher, spec.strategies, spec.options),
        spec.traces,
        workspace.job.seed,
        extra={"system": spec.system, "options": spec.options, **_teacher_code(spec)},
        transform=partial(add_strategy_messages, system=spec.system),
        show=lambda kept, rejected: workspace.progress(kept, spec.traces, "traces", rejected=rejected),
    )
    collected.write(workspace.root / OUTPUT)
    kept = collected.kept
    if len(kept) < spec.traces:
        what = f"{len(kept)} of {spec.traces} traces passed the verifier ({collected.describe_rejections()})"
        raise WorkFailedError(what, where=f"stage {workspace.job.stage}", remedy=_remedy(collected))
    counts = {f"source/{name}": count for name, count in collected.sources.items()}
    workspace.metric(0, rows=len(kept), rejected=len(collected.rejected), **counts)
    for record in islice(kept, 3):
        workspace.log(f"{record.source}: {''.join(message['content'] for message in record.messages)}")
    return {
        "kind": "dataset",
        "rows": len(kept),
        "rejected": len(collected.rejected),
        "reasons": dict(collected.reasons.most_common(MOST_REASONS)),
        "sources": dict(collected.sources),
        "environment": collected.environment,
        "seconds": perf_counter() - start,
    }


def _remedy(collected: CollectedTraces) -> str:
    """Return the remedy when too few traces were collected."""
    path = f"{OUTPUT}/rejected.jsonl in the run's directory"
    failed = sum(count for reason, count in collected.reasons.items() if reason.startswith("verifier:"))
    if failed > len(collected.rejected) / 2:
        return (
            f"correct the verifier; its failures are in {path}, and `perilune environments check` finds them"
        )
    kept = len(collected.kept)
    fewer = f"set traces to {kept} at most" if collected.exhausted and kept else "lower traces"
    return f"{fewer}, widen the environment's config, or use another teacher; look at {path}"


def _teacher_code(spec: CollectSpec) -> dict[str, str]:
    """Return the text of a teacher's file, for the provenance."""
    source = None if isinstance(spec.teacher, str) else spec.teacher.source
    return {} if source is None else {"code": source}


def add_strategy_messages(candidates: Iterable[Candidate], system: Mapping[str, str]) -> Iterator[Candidate]:
    """Yield the candidates, each with its strategy's system message, if any, before the prompt."""
    for candidate in candidates:
        strategy = candidate.source.rpartition("/")[2]
        (task,) = add_system_message([candidate.task], system.get(strategy, ""))
        yield replace(candidate, task=task)
