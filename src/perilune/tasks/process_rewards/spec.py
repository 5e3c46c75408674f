"""calibrate: whether training-free process rewards can be trusted with a policy, before any are paid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from perilune.bundle.job import Job
from perilune.bundle.plugin import Consumes
from perilune.learn.process_rewards import AnswerValues, ProcessRewardField
from perilune.tasks.stage.sampling import SamplingSpec

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace


class CalibrateSpec(SamplingSpec):
    """Fields of a calibrate stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(description="policy that is asked and plays")
    tasks: int = Field(64, ge=2, description="held-out tasks")
    samples: int = Field(4, ge=1, description="answers a task")
    continuations: int = Field(16, ge=2, description="played from each prefix of an answer")
    process_rewards: ProcessRewardField = Field(
        AnswerValues(), description="what is calibrated: `answer`, or its section"
    )
    token_budget: int = Field(4096, ge=1, description="tokens in one forward pass, a matter of memory")

    @model_validator(mode="after")
    def _cheap(self) -> CalibrateSpec:
        if self.process_rewards is None or self.process_rewards.name != "answer":
            raise ValueError("process is what is compared with play: give answer, or a section of that name")
        return self


class Calibrate:
    """Compares the process rewards of an rl stage with Monte Carlo values of the same prefixes."""

    name = "calibrate"
    spec = CalibrateSpec
    produces = "evaluation"
    output = "artifacts/summary.json"

    def plan(self, job: Job) -> Mapping[str, object]:
        """Answers to sample."""
        from perilune.tasks.stage.memory_plan import model_config, stage_memory

        spec = CalibrateSpec.model_validate(job.spec)
        answers = spec.tasks * spec.samples
        most = spec.process_rewards.segments.most if spec.process_rewards else 0
        memory = stage_memory(
            model_config(job), samples=answers, max_tokens=spec.max_tokens, device=job.resources.device
        )
        return {
            "answers": f"{spec.tasks} held-out tasks x {spec.samples} = {answers:,}",
            "continuations": f"{spec.continuations} from each of at most {most} prefixes an answer",
            "memory": memory,
        }

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Sample, value, play on, compare."""
        import time

        import numpy as np

        from perilune.data.episodes_file import write_episodes
        from perilune.errors import WorkFailedError
        from perilune.rollout.timing import Stopwatch
        from perilune.tasks.process_rewards.calibration import Calibrated, calibration_summary, flat, told
        from perilune.tasks.process_rewards.rewards import ProcessRewards
        from perilune.tasks.stage.player import open_player, outcome_figures
        from perilune.tasks.stage.policy import heldout_tasks

        spec = CalibrateSpec.model_validate(workspace.job.spec)
        assert isinstance(spec.process_rewards, AnswerValues)
        workspace.rewind(-1)  # what an earlier attempt left
        total, seed = spec.tasks * spec.samples, workspace.job.seed
        watch = Stopwatch()
        with open_player(workspace, spec.max_tokens) as player:
            process = ProcessRewards(
                spec.process_rewards, player.policy.decoder, player.rollouts, spec, spec.token_budget
            )
            tasks = heldout_tasks(player.environment, spec.tasks, seed)
            groups = player.play(
                tasks, samples=spec.samples, temperature=spec.temperature, step=0, watch=watch, total=total
            )
            walks = process.walks(tasks, groups)
            begun = time.perf_counter()
            values = process.answered(walks, spec.process_rewards)
            valued = time.perf_counter()
            verdicts = process.played(walks, 0, spec.continuations)
            played = time.perf_counter()
        episodes = [one for group in groups for one in group]
        answers = [
            Calibrated(walk.task.task_id, found, outcomes)
            for walk, found, outcomes in zip(walks, values, verdicts, strict=True)
            if found is not None and not np.isnan(outcomes).any()
        ]
        if not answers:
            raise WorkFailedError(
                "no answer could be given values: none is stated, it is guessed too easily, or nobody judged",
                where=player.environment.id,
                remedy="choose an environment that states its answers, or raise process_rewards.guessable",
            )
        summary = {
            "kind": "calibration",
            "environment": player.environment.id,
            "tasks": spec.tasks,
            "samples": spec.samples,
            "continuations": spec.continuations,
            "without": 1 - len(answers) / len(episodes),
            **outcome_figures(episodes, player.environment.id),
            **calibration_summary(answers, seed),
        }
        workspace.episodes.mkdir(exist_ok=True)
        write_episodes(workspace.episodes / "step-000000.parquet", episodes)
        workspace.metric(0, **flat(summary))
        workspace.timing(0, **watch.figures() | {"values": valued - begun, "play": played - valued})
        workspace.progress(total, total, "answers")
        said = told(summary)
        for sentence in said:
            workspace.log(sentence)
        return summary | {
            "said": said,
            "seconds": watch.elapsed,
            "seconds_values": valued - begun,
            "seconds_play": played - valued,
        }


plugin = Calibrate()
