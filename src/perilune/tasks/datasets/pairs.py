"""pairs: sample answers, have them judged, and keep a better with a worse one of each task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from perilune.bundle.job import Job
from perilune.bundle.plugin import Consumes
from perilune.tasks.stage.sampling import SamplingSpec

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace


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


class Pairs:
    """The verifier says which of two answers is better; what is kept is a preference dataset."""

    name = "pairs"
    spec = PairsSpec
    produces = "preferences"
    output = "artifacts/pairs"

    def plan(self, job: Job) -> Mapping[str, object]:
        """Answers to sample, and how many pairs at most."""
        from perilune.tasks.stage.memory_plan import sampling_memory

        spec = PairsSpec.model_validate(job.spec)
        answers = spec.tasks * spec.samples
        return {
            "answers": f"{spec.tasks} training tasks x {spec.samples} = {answers:,}",
            "pairs at most": f"{spec.tasks * min(spec.pairs_per_task, spec.samples // 2):,}",
            "memory": sampling_memory(job, spec.max_tokens, answers),
        }

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Sample, judge, pair up."""
        from perilune.data.episodes_file import write_episodes
        from perilune.data.preferences import FILE, choose_pairs, make_pair, write_preferences
        from perilune.errors import RequestError, WorkFailedError
        from perilune.rollout.timing import Stopwatch
        from perilune.tasks.stage.player import open_player, outcome_figures

        spec = PairsSpec.model_validate(workspace.job.spec)
        workspace.rewind(-1)  # what an earlier attempt left
        watch = Stopwatch()
        total = spec.tasks * spec.samples
        with open_player(workspace, spec.max_tokens) as player:
            if getattr(player.environment, "max_turns", 1) > 1:
                raise RequestError(
                    f"pairs are of two answers to one prompt, and {player.environment.id} has several turns",
                    where="environment",
                    remedy="learn from its rewards with rl",
                )
            tasks = player.training_tasks(spec.skip).take(spec.tasks)
            groups = player.play(
                tasks, samples=spec.samples, temperature=spec.temperature, step=0, watch=watch, total=total
            )
        chosen = [
            pair
            for group in groups
            for pair in choose_pairs(
                group, most=spec.pairs_per_task, gap=spec.gap, most_alike=spec.most_alike,
                length_gap=spec.length_gap,
            )
        ]  # fmt: skip
        episodes = [one for group in groups for one in group]
        figures = outcome_figures(episodes, f"stage {workspace.job.stage}")
        workspace.episodes.mkdir(exist_ok=True)
        write_episodes(workspace.episodes / "step-000000.parquet", episodes)
        if not chosen:
            raise WorkFailedError(
                f"no pair among {total:,} answers, {figures['pass_rate']:.1%} of them right",
                where=f"stage {workspace.job.stage}",
                remedy="take a checkpoint that is right now and then, more samples, or a smaller gap",
            )
        source = f"sampled/{workspace.job.spec['checkpoint']}"
        write_preferences(
            workspace.root / self.output / FILE, (make_pair(*pair, source=source) for pair in chosen)
        )
        lengths = [[len(one.token_ids) for one in side] for side in zip(*chosen, strict=True)]
        told = {
            "rows": len(chosen),
            "tasks_without_pair": spec.tasks - len({better.task_id for better, _ in chosen}),
            "length_chosen": sum(lengths[0]) / len(chosen),
            "length_rejected": sum(lengths[1]) / len(chosen),
        }
        workspace.metric(0, **told, **figures)
        workspace.timing(0, **watch.figures())
        workspace.progress(total, total, "answers", pairs=len(chosen))
        workspace.log(f"{len(chosen)} pairs from {spec.tasks} tasks")
        return {
            "kind": "preferences",
            **told,
            **{name: figures[name] for name in ("pass_rate", "failures", "truncated")},
            "environment": player.environment.id,
            "seconds": watch.elapsed,
        }


plugin = Pairs()
