"""evaluate: how good a checkpoint is on held-out tasks, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from perilune.bundle.job import Job
from perilune.bundle.machine import require_memory
from perilune.bundle.plugin import Consumes
from perilune.tasks.stage.sampling import (
    Sampler,
    SamplingSpec,
    ServerSpec,
    check_server,
    open_server,
    remote_sampler,
)

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace


class EvaluateSpec(SamplingSpec):
    """Fields of an evaluate stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(description="stage whose checkpoint is judged")
    tasks: int = Field(128, ge=1, le=1_000_000, description="held-out tasks")
    samples: int = Field(8, ge=1, le=4096, description="samples a task, for pass@k up to this k")
    system: str = Field("", description="system message before each task; empty: none")
    engine: ServerSpec | None = Field(
        None, description="server that holds the weights; of the checkpoint, only the tokenizer is then read"
    )


class Evaluate:
    """Judges a checkpoint on held-out tasks; the same tasks for every checkpoint of a recipe."""

    name = "evaluate"
    spec = EvaluateSpec
    produces = "evaluation"
    output = "artifacts/summary.json"

    def plan(self, job: Job) -> Mapping[str, object]:
        """Answers to sample."""
        from perilune.tasks.stage.memory_plan import model_config, planned_tokens, sampling_memory

        spec = EvaluateSpec.model_validate(job.spec)
        config = None if spec.engine else model_config(job)
        longest = planned_tokens(job.environment, spec.max_tokens, config)
        if spec.engine is not None:
            check_server(spec.engine, job)
            needs: dict[str, object] = {"engine": spec.engine.url}
        else:
            needs = {"memory": sampling_memory(job, spec.max_tokens, spec.tasks * spec.samples)}
        return {
            "answers": f"{spec.tasks} held-out tasks x ({spec.samples} samples + 1 greedy)"
            f" = {spec.tasks * (spec.samples + 1):,}",
            "tokens at most": f"{spec.tasks * (spec.samples + 1) * longest:,}",
            **needs,
        }

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Sample, judge, count."""
        from perilune.data.episodes_file import write_episodes
        from perilune.environments.core.registry import make_environment
        from perilune.rollout.timing import Stopwatch
        from perilune.rollout.worker import RolloutWorker
        from perilune.tasks.distill.hints import hinted
        from perilune.tasks.stage.outcomes import evaluation_summary
        from perilune.tasks.stage.policy import heldout_tasks
        from perilune.verifiers import Scorer

        spec = EvaluateSpec.model_validate(workspace.job.spec)
        seed = workspace.job.seed
        workspace.rewind(-1)  # what an earlier attempt left
        with (
            Scorer(workspace.job.environment) as scorer,  # its process warms up while the model loads
            _sampler(spec, workspace) as (sampler, figures),
        ):
            environment = make_environment(workspace.job.environment)
            rollouts = RolloutWorker(sampler.engine, sampler.tokenizer, scorer, environment, seed)
            tasks = hinted(heldout_tasks(environment, spec.tasks, seed), spec.system)
            total = spec.tasks * (spec.samples + 1)
            watch = Stopwatch()
            groups = rollouts.play(
                tasks,
                samples=spec.samples,
                params=spec.params(sampler.stop_token_ids),
                step=0,
                watch=watch,
                on_progress=lambda done, _: workspace.progress(done, total, "answers"),
            )
            sampled = spec.tasks * spec.samples
            greedy = rollouts.play(
                tasks,
                samples=1,
                params=spec.params(sampler.stop_token_ids, greedy=True),
                step=0,
                watch=watch,
                on_progress=lambda done, _: workspace.progress(sampled + done, total, "answers"),
            )

        workspace.episodes.mkdir(exist_ok=True)
        write_episodes(workspace.episodes / "step-000000.parquet", [one for group in groups for one in group])
        write_episodes(workspace.episodes / "greedy.parquet", [group[0] for group in greedy])
        summary = evaluation_summary(environment.id, groups, [group[0] for group in greedy], seed)
        mean = summary["pass@1"]["mean"]
        workspace.metric(0, **{key: summary[key] for key in ("pass@1", "greedy", "length", "truncated")})
        workspace.timing(0, **watch.figures())
        workspace.progress(total, total, "answers", **{"pass@1": mean})
        workspace.log(f"pass@1 {mean:.3f} on {spec.tasks} held-out tasks of {environment.id}")
        return summary | {
            "tokens_per_second": watch.figures()["tokens_per_second"],
            "seconds": watch.elapsed,
            **figures(),
        }


@contextmanager
def _sampler(
    spec: EvaluateSpec, workspace: Workspace
) -> Iterator[tuple[Sampler, Callable[[], dict[str, Any]]]]:
    """Who answers; and what is to be said of it once all is answered."""
    if spec.engine is not None:
        with open_server(spec.engine, workspace) as server:
            told = {"url": server.url, "model": server.model, "kind": server.server}
            yield remote_sampler(server, workspace), lambda: {"server": told}
        return

    from perilune.engine.engine import Engine
    from perilune.tasks.stage.memory_plan import engine_room, memory_figures, planned_tokens, stage_memory
    from perilune.tasks.stage.policy import load_policy, prepare_device

    device = prepare_device(workspace)
    policy = load_policy(workspace, device, only_samples=True)
    config = policy.decoder.config
    longest = planned_tokens(workspace.job.environment, spec.max_tokens, config)
    needed = stage_memory(config, samples=spec.tasks * spec.samples, max_tokens=longest, device=device.type)
    memory = require_memory(needed, workspace.job.resources)
    engine = Engine(policy.decoder, **engine_room(config, longest, device.type))
    sampler = Sampler(engine, policy.tokenizer, policy.stop_token_ids)
    yield sampler, lambda: {"memory": memory_figures(memory, device)}


plugin = Evaluate()
