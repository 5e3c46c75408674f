"""The work of pairs: sample and score answers, and pair a better with a worse answer to the same task."""

from functools import partial
from typing import Any

from perilune.bundle.workspace import Workspace
from perilune.data.episodes_file import write_episodes
from perilune.data.preferences import PREFERENCES_FILE, choose_pairs, make_pair, write_preferences
from perilune.errors import WorkFailedError
from perilune.rollout.timing import Stopwatch
from perilune.tasks.datasets.stages import PairsSpec, require_single_turn
from perilune.tasks.stage.memory_plan import sampling_plan
from perilune.tasks.stage.outcomes import outcome_figures
from perilune.tasks.stage.player import open_player

OUTPUT = "artifacts/pairs"


def run(workspace: Workspace, spec: PairsSpec) -> dict[str, Any]:
    """Sample, score and pair answers; return the summary."""
    workspace.rewind(-1)  # removes the metrics of an earlier attempt
    watch = Stopwatch()
    total = spec.tasks * spec.samples
    with open_player(workspace, spec.max_tokens, memory=sampling_plan(total)) as player:
        require_single_turn(player.environment)
        tasks = player.training_tasks(spec.skip).take(spec.tasks)
        groups = player.play(
            tasks, samples=spec.samples, temperature=spec.temperature, step=0, watch=watch, total=total
        )
    choose = partial(
        choose_pairs,
        most=spec.pairs_per_task,
        gap=spec.gap,
        most_alike=spec.most_alike,
        length_gap=spec.length_gap,
    )
    chosen = [pair for group in groups for pair in choose(group)]
    episodes = [episode for group in groups for episode in group]
    figures = outcome_figures(episodes, f"stage {workspace.job.stage}")
    write_episodes(workspace.episodes / "step-000000.parquet", episodes)
    if not chosen:
        raise WorkFailedError(
            f"no two of {total:,} answers make a pair; {figures['pass_rate']:.1%} of them are right",
            where=f"stage {workspace.job.stage}",
            remedy="use a checkpoint that solves some tasks, raise samples, or lower gap",
        )
    source = f"sampled/{workspace.job.spec['checkpoint']}"
    write_preferences(
        workspace.root / OUTPUT / PREFERENCES_FILE, (make_pair(*pair, source=source) for pair in chosen)
    )
    lengths = [[len(episode.token_ids) for episode in side] for side in zip(*chosen, strict=True)]
    counts = {
        "rows": len(chosen),
        "tasks_without_pair": spec.tasks - len({better.task_id for better, _ in chosen}),
        "length_chosen": sum(lengths[0]) / len(chosen),
        "length_rejected": sum(lengths[1]) / len(chosen),
    }
    workspace.metric(0, **counts, **figures)
    workspace.timing(0, **watch.figures())
    workspace.progress(total, total, "answers", pairs=len(chosen))
    workspace.log(f"{len(chosen)} pairs from {spec.tasks} tasks")
    return {
        "kind": "preferences",
        **counts,
        **{name: figures[name] for name in ("pass_rate", "failures", "truncated")},
        "environment": player.environment.id,
        "seconds": watch.elapsed,
    }
