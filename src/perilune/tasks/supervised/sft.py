"""sft: imitate verified traces, so that reinforcement learning has something to climb from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from perilune.bundle.job import Job
from perilune.bundle.machine import require_memory
from perilune.bundle.plugin import Consumes
from perilune.learn.training_settings import LearnerSettings
from perilune.tasks.stage.learning_rates import describe_learning_rate, read_spec
from perilune.tasks.stage.retention import Saving, planned

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace


class SFTSpec(Saving, LearnerSettings):
    """Fields of an sft stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field("model", description="where the weights start")
    data: Annotated[str, Consumes("dataset")] = Field(description="stage whose traces are imitated")
    steps: int = Field(300, ge=1, description="optimizer steps")
    batch_size: int = Field(64, ge=1, description="traces a step")
    warmup: int = Field(20, ge=0, description="optimizer steps of linear warm-up")
    final_lr: float = Field(0.1, ge=0, le=1, description="last learning rate over peak; 1 is constant")
    save_every: int = Field(100, ge=1, description="steps between two checkpoints to resume from")


class SFT:
    """Supervised fine-tuning on the assistant's part of each trace."""

    name = "sft"
    spec = SFTSpec
    produces = "checkpoint"
    output = "artifacts/checkpoints/final"
    parallel = True

    def plan(self, job: Job) -> Mapping[str, object]:
        """Traces seen, the schedule and memory."""
        from perilune.tasks.stage.memory_plan import model_config, stage_memory

        spec = read_spec(SFTSpec, job)
        memory = stage_memory(model_config(job), token_budget=spec.token_budget, learner=spec)
        return {
            "traces seen": f"{spec.steps} steps x {spec.batch_size} = {spec.steps * spec.batch_size:,}",
            "learning rate": describe_learning_rate(spec, job),
            "checkpoints": planned(spec, memory),
            **spec.planned(),
            "memory": memory,
        }

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Batches in, a checkpoint out."""
        from perilune.learn.algorithms import algorithm
        from perilune.learn.batch import pack
        from perilune.learn.schedules import learning_rate
        from perilune.learn.trainer import Learner
        from perilune.rollout.timing import Stopwatch
        from perilune.tasks.stage.memory_plan import memory_figures, stage_memory
        from perilune.tasks.stage.policy import join_ranks, load_policy, prepare_device
        from perilune.tasks.stage.training import (
            finish,
            first_and_last,
            restore_optimizer,
            resume,
            save_when_due,
        )
        from perilune.tasks.supervised.demonstrations import Demonstrations

        spec = read_spec(SFTSpec, workspace.job, workspace.log)
        device = prepare_device(workspace)
        policy = load_policy(workspace, device, spec)
        memory = require_memory(
            stage_memory(policy.decoder.config, token_budget=spec.token_budget, learner=spec),
            workspace.job.resources,
        )
        learner = Learner(policy.decoder, spec, ranks=join_ranks(workspace, device))
        restore_optimizer(workspace, learner, spec)
        demonstrations = Demonstrations.load(
            workspace.input("data"), policy.tokenizer, workspace.job.seed,
            policy.decoder.config.max_position_embeddings,
        )  # fmt: skip
        sft = algorithm("sft")

        first = resume(workspace, learner)
        total_watch = Stopwatch()
        for step in range(first, spec.steps):
            watch = Stopwatch()
            episodes = demonstrations.batch(step, spec.batch_size)
            figures = learner.forward_backward(pack([sft(episodes, max_tokens=0)], spec.token_budget))
            figures |= learner.optim_step(learning_rate(spec, step, spec.steps))
            watch.learning = watch.elapsed
            workspace.metric(step + 1, **figures)
            workspace.timing(step + 1, **watch.figures(), tokens=figures["tokens"])
            workspace.progress(step + 1, spec.steps, loss=figures["loss"], lr=figures["lr"])
            save_when_due(workspace, learner, step + 1, spec)
        return finish(workspace, policy, learner, spec) | {
            "algorithm": "sft",
            "traces": len(demonstrations),
            **first_and_last(workspace.metrics(), ("loss",)),
            "seconds": total_watch.elapsed,
            "memory": memory_figures(memory, device),
        }


plugin = SFT()
