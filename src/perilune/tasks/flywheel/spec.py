"""flywheel: sample, verify, filter, train, evaluate, and again, while it still gains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from perilune.bundle.job import Job
from perilune.bundle.plugin import Consumes
from perilune.learn.training_settings import LearnerSettings
from perilune.tasks.stage.learning_rates import describe_learning_rate, read_spec
from perilune.tasks.stage.retention import Saving
from perilune.tasks.stage.sampling import SamplingSpec

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace


class FlywheelSpec(Saving, LearnerSettings, SamplingSpec):
    """Fields of a flywheel stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(description="where the policy starts")
    steps: int = Field(4, ge=1, description="rounds, unless it stops gaining before")
    tasks: int = Field(1024, ge=1, description="fresh training tasks a round")
    samples: int = Field(4, ge=1, description="answers a task, of which the likeliest right one is kept")
    updates: int = Field(100, ge=1, description="optimizer steps a round, on the traces of all rounds")
    batch_size: int = Field(64, ge=1, description="traces an optimizer step")
    heldout: int = Field(256, ge=2, description="held-out tasks that each round is judged on")
    save_every: int = Field(1, ge=1, description="rounds between two checkpoints to resume from")


class Flywheel:
    """Rounds of learning one's own right answers."""

    name = "flywheel"
    spec = FlywheelSpec
    produces = "checkpoint"
    output = "artifacts/checkpoints/final"

    def plan(self, job: Job) -> Mapping[str, object]:
        """Answers, updates and memory."""
        from perilune.tasks.stage.memory_plan import model_config, stage_memory

        spec = read_spec(FlywheelSpec, job)
        memory = stage_memory(
            model_config(job), samples=spec.tasks * spec.samples, max_tokens=spec.max_tokens,
            token_budget=spec.token_budget, device=job.resources.device, learner=spec,
        )  # fmt: skip
        answers = spec.tasks * spec.samples
        return {
            "answers": f"{spec.steps} x {spec.tasks} tasks x {spec.samples} = {spec.steps * answers:,}",
            "updates": f"{spec.steps} x {spec.updates}, learning rate {describe_learning_rate(spec, job)}",
            "judged on": f"{spec.heldout} held-out tasks before the first round and after each",
            **spec.planned(),
            "memory": memory,
        }

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """The loop."""
        from perilune.learn.trainer import Learner
        from perilune.tasks.flywheel.loop import Rounds
        from perilune.tasks.stage.player import open_player
        from perilune.tasks.stage.training import finish, restore_optimizer, resume

        spec = read_spec(FlywheelSpec, workspace.job, workspace.log)
        with open_player(workspace, spec.max_tokens, spec) as player:
            learner = Learner(player.policy.decoder, spec)
            restore_optimizer(workspace, learner, spec)
            first = resume(workspace, learner)
            rounds = Rounds(workspace, spec, player, learner)
            if first == 0:
                workspace.rewind(-1)
                rounds.begin()
            for number in range(first + 1, spec.steps + 1):
                if rounds.stalled:
                    break
                traces = rounds.sample(number)
                rounds.train(number)
                rounds.judge(number, traces)
        return {**finish(workspace, player.policy, learner, spec), **rounds.summary()}


plugin = Flywheel()
