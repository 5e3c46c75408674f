"""The work of evaluate: sample held-out tasks, score the answers, and summarize them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from perilune.bundle.machine import require_memory
from perilune.bundle.workspace import Workspace
from perilune.data.episodes_file import write_episodes
from perilune.environments.core.registry import make_environment
from perilune.metrics.bootstrap import paired_difference
from perilune.metrics.proportion import pass_rate_interval
from perilune.rollout.groups import flatten
from perilune.rollout.timing import Stopwatch
from perilune.rollout.worker import RolloutWorker
from perilune.tasks.checks.answer_form import rare_form_warning
from perilune.tasks.evaluate.stage import EvaluateSpec
from perilune.tasks.stage.custom_metrics import CustomMetrics
from perilune.tasks.stage.memory_plan import (
    CacheSettings,
    make_engine,
    memory_figures,
    plan_stage_memory,
    planned_episode_tokens,
)
from perilune.tasks.stage.new_tokenizer import MODEL
from perilune.tasks.stage.outcomes import PASS_REWARD, evaluation_summary
from perilune.tasks.stage.policy import heldout_tasks, load_policy, prepare_device
from perilune.tasks.stage.sampling import Sampler, ServerSpec, open_server, remote_sampler
from perilune.tasks.stage.sub_agents import open_sub_agents
from perilune.tasks.stage.system_message import add_system_message
from perilune.verifiers import Scorer


def run(workspace: Workspace, spec: EvaluateSpec) -> dict[str, Any]:
    """Sample and score answers; return the summary."""
    seed = workspace.job.seed
    workspace.rewind(-1)  # removes the metrics of an earlier attempt
    with (
        Scorer(workspace.job.environment) as scorer,  # its process starts while the model loads
        _sampler(spec, workspace) as (sampler, figures),
    ):
        environment = make_environment(workspace.job.environment)
        rollouts = RolloutWorker(
            sampler.engine, sampler.tokenizer, scorer, environment, seed, sub_agents=sampler.sub_agents
        )
        tasks = add_system_message(heldout_tasks(environment, spec.tasks, seed), spec.system)
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

    episodes = flatten(groups)
    write_episodes(workspace.episodes / "step-000000.parquet", episodes)
    write_episodes(workspace.episodes / "greedy.parquet", [group[0] for group in greedy])
    summary = evaluation_summary(environment.id, groups, [group[0] for group in greedy], seed)
    summary |= _against_recording(environment, summary, seed)
    custom = CustomMetrics(spec.metrics, workspace.log).figures(episodes)
    _record(workspace, summary, custom)
    workspace.timing(0, **watch.figures())
    workspace.progress(total, total, "answers", **{"pass@1": summary["pass@1"]["mean"]})
    is_untrained = workspace.job.model.get("preset") and spec.checkpoint == MODEL
    warning = (
        "" if is_untrained else rare_form_warning(summary.get("format"), summary["truncated"], workspace.job)
    )
    if warning:
        workspace.log(f"warning: {warning}")
        workspace.event("rare_form")
    return summary | {
        **({"own": custom} if custom else {}),
        **({"warnings": [warning]} if warning else {}),
        "tokens_per_second": watch.figures()["tokens_per_second"],
        "seconds": watch.elapsed,
        **figures(),
    }


def _against_recording(environment: Any, summary: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return pass@1 of the episodes that a suite recorded, and the change since then, paired by task."""
    recorded: dict[str, list[float]] = getattr(environment, "recorded", dict)()
    now = {task: right / n for task, n, right in summary["correct_per_task"] if task in recorded}
    if not now:
        return {}
    then = {task: sum(score >= PASS_REWARD for score in recorded[task]) / len(recorded[task]) for task in now}
    return {
        "recorded": {
            "tasks": len(now),
            "pass@1": pass_rate_interval([*then.values()], seed=seed)._asdict(),
            "change": paired_difference(then, now, seed=seed)._asdict(),
        }
    }


def _record(workspace: Workspace, summary: Mapping[str, Any], own: Mapping[str, float]) -> None:
    """Write the metrics, and log pass@1 of the environment and of each part of a mixture."""
    parts = {
        part: entry["pass@1"]
        for part, entry in summary.get("by_environment", {}).items()
        if "pass@1" in entry  # a part without a scored answer has none
    }
    workspace.metric(
        0,
        **{key: summary[key] for key in ("pass@1", "greedy", "length", "truncated")},
        **{f"environment/{part}/pass@1": entry for part, entry in parts.items()},
        **{f"own/{name}": value for name, value in own.items()},
    )
    held_out = f"{summary['tasks'] + summary['tasks_without_verdict']} held-out tasks"
    workspace.log(f"pass@1 {summary['pass@1']['mean']:.3f} on {held_out} of {summary['environment']}")
    for part, entry in parts.items():
        workspace.log(f"  {part}: pass@1 {entry['mean']:.3f}")


@contextmanager
def _sampler(
    spec: EvaluateSpec, workspace: Workspace
) -> Iterator[tuple[Sampler, Callable[[], dict[str, Any]]]]:
    """Yield the engine or server that samples, and a function for its entries in the summary."""
    if isinstance(spec.engine, ServerSpec):
        with open_server(spec.engine, workspace) as server:
            described = {"url": server.url, "model": server.model, "kind": server.server}
            yield remote_sampler(server, workspace), lambda: {"server": described}
        return

    device = prepare_device(workspace)
    policy = load_policy(workspace, device, sampling_only=True)
    policy.decoder.set_precision(spec.precision)
    config = policy.decoder.config
    longest = planned_episode_tokens(workspace.job.environment, spec.max_tokens, config)
    cache = CacheSettings(device.type, spec.precision)
    needed = plan_stage_memory(config, samples=spec.tasks * spec.samples, max_tokens=longest, cache=cache)
    memory = require_memory(needed, workspace.job.resources)
    backend = spec.engine.runner() if spec.engine else None
    engine = make_engine(policy.decoder, longest, policy.tokenizer, samples=memory.slots, backend=backend)
    sub_agents = open_sub_agents(workspace, policy, device, longest)
    sampler = Sampler(engine, policy.tokenizer, policy.stop_token_ids, sub_agents)
    yield sampler, lambda: {"memory": memory_figures(memory, device)}
