"""reward_model: learn from pairs to score an answer by one number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from perilune.bundle.job import Job
from perilune.bundle.machine import require_memory
from perilune.bundle.plugin import Consumes
from perilune.learn.training_settings import OptimizerSettings
from perilune.tasks.stage.learning_rates import describe_learning_rate, read_spec
from perilune.tasks.stage.retention import Saving, planned

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace


class RewardModelSpec(Saving, OptimizerSettings):
    """Fields of a reward_model stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(description="whose body it is built on")
    data: Annotated[str, Consumes("preferences")] = Field(description="stage whose pairs are learned from")
    refresh: Annotated[str | None, Consumes("reward_model")] = Field(
        None, description="reward model to go on from, with the new failures in data"
    )
    replay: Annotated[str | None, Consumes("preferences")] = Field(
        None, description="older pairs to learn from beside data, so that they are not forgotten"
    )
    centre: float = Field(0.01, ge=0, description="how strongly the mean score of a pair is drawn to 0")
    steps: int = Field(100, ge=1, description="optimizer steps")
    batch_size: int = Field(32, ge=1, description="pairs a step")
    validation: float = Field(0.1, ge=0, lt=1, description="share of tasks whose pairs are held out")
    validate_every: int = Field(20, ge=1, description="steps between two looks at them")
    final_lr: float = Field(0.1, ge=0, le=1, description="last learning rate over peak; 1 is constant")
    save_every: int = Field(50, ge=1, description="steps between two checkpoints to resume from")


class RewardModelTask:
    """A Bradley-Terry reward model on the decoder."""

    name = "reward_model"
    spec = RewardModelSpec
    produces = "reward_model"
    output = "artifacts/checkpoints/final"
    parallel = True

    def plan(self, job: Job) -> Mapping[str, object]:
        """Pairs seen, the schedule and memory."""
        from perilune.tasks.stage.memory_plan import model_config, stage_memory

        spec = read_spec(RewardModelSpec, job)
        memory = stage_memory(model_config(job), token_budget=spec.token_budget)
        return {
            "pairs seen": f"{spec.steps} steps x {spec.batch_size} = {spec.steps * spec.batch_size:,}",
            "learning rate": describe_learning_rate(spec, job),
            "checkpoints": planned(spec, memory),
            "memory": memory,
        }

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Pairs in, a reward model out."""
        from perilune.learn.batch import pack_pairs
        from perilune.learn.reward_model import RewardObjective, as_read, score_figures, score_pairs
        from perilune.learn.schedules import learning_rate
        from perilune.learn.trainer import Learner
        from perilune.metrics.bootstrap import bootstrap_problems
        from perilune.models.reward_model import RewardModel, load_reward_model, save_reward_model
        from perilune.rollout.timing import Stopwatch
        from perilune.tasks.stage.memory_plan import memory_figures, stage_memory
        from perilune.tasks.stage.policy import Policy, join_ranks, load_policy, prepare_device
        from perilune.tasks.stage.training import finish, first_and_last, resume, save_when_due
        from perilune.tasks.supervised.preference_data import PreferenceData

        spec = read_spec(RewardModelSpec, workspace.job, workspace.log)
        device = prepare_device(workspace)
        policy = load_policy(workspace, device)
        if workspace.has_input("refresh"):
            model, _ = load_reward_model(workspace.input("refresh"), device)
        else:
            model = RewardModel.on(policy.decoder)
        memory = require_memory(
            stage_memory(model.config, token_budget=spec.token_budget), workspace.job.resources
        )
        paths = [workspace.input(name) for name in ("data", "replay") if workspace.has_input(name)]
        data = PreferenceData.load(
            paths, policy.tokenizer, workspace.job.seed, model.config.max_position_embeddings, spec.validation
        )
        learner = Learner(model, spec, ranks=join_ranks(workspace, device))
        trained = learner.trained
        assert isinstance(trained, RewardModel)
        before = score_figures(score_pairs(model, data.train, spec.token_budget), data.train)

        first = resume(workspace, learner)
        total_watch = Stopwatch()
        for step in range(first, spec.steps):
            watch = Stopwatch()
            pairs = data.batch(step, spec.batch_size)
            objective = RewardObjective(trained, len(pairs), spec.centre, learner.ranks)
            figures = learner.forward_backward_custom(
                pack_pairs(as_read(pairs), spec.token_budget), objective
            )
            figures |= objective.figures(pairs) | learner.optim_step(learning_rate(spec, step, spec.steps))
            if data.validation and ((step + 1) % spec.validate_every == 0 or step + 1 == spec.steps):
                scores = score_pairs(model, data.validation, spec.token_budget)
                held = score_figures(scores, data.validation)
                figures |= {f"validation_{name}": held[name] for name in ("accuracy", "margin")}
            watch.learning = watch.elapsed
            workspace.metric(step + 1, **figures)
            workspace.timing(step + 1, **watch.figures(), tokens=figures["tokens"])
            workspace.progress(step + 1, spec.steps, loss=figures["loss"], accuracy=figures["accuracy"])
            save_when_due(workspace, learner, step + 1, spec)
        held_out: dict[str, Any] = {}
        if data.validation:
            scores = score_pairs(model, data.validation, spec.token_budget)
            right = (scores[:, 0] > scores[:, 1]).astype(float)
            held_out = score_figures(scores, data.validation) | {
                "accuracy": bootstrap_problems(right, seed=workspace.job.seed)._asdict()
            }
        summary = finish(workspace, Policy(model, policy.tokenizer), learner, spec, write=save_reward_model)
        return summary | {
            "algorithm": "bradley_terry",
            "pairs": len(data.train),
            "validation_pairs": len(data.validation),
            **first_and_last(workspace.metrics(), ("loss", "accuracy", "margin")),
            "accuracy_before": before["accuracy"],
            "validation": held_out,
            "seconds": total_watch.elapsed,
            "memory": memory_figures(memory, device),
        }


plugin = RewardModelTask()
