"""The loop of reward_model: train a reward model on pairs."""

from typing import Any

from perilune.bundle.machine import require_memory
from perilune.bundle.workspace import Workspace
from perilune.learn.batch import pack_pairs
from perilune.learn.reward_model import RewardObjective, append_scored_tokens, score_figures, score_pairs
from perilune.learn.schedules import learning_rate
from perilune.learn.trainer import Learner
from perilune.metrics.proportion import pass_rate_interval
from perilune.models.reward_model import RewardModel, load_reward_model, save_reward_model
from perilune.rollout.timing import Stopwatch
from perilune.tasks.stage.memory_plan import CacheSettings, memory_figures, plan_stage_memory
from perilune.tasks.stage.policy import Policy, join_ranks, load_policy, prepare_device
from perilune.tasks.stage.training import StepReport, TrainingLoop, mean_first_and_last
from perilune.tasks.supervised.preference_data import PreferenceData
from perilune.tasks.supervised.stages import RewardModelSpec


def run(workspace: Workspace, spec: RewardModelSpec) -> dict[str, Any]:
    """Train the reward model on the pairs and return the stage's summary."""
    device = prepare_device(workspace)
    policy = load_policy(workspace, device)
    if workspace.has_input("refresh"):
        model, _ = load_reward_model(workspace.input("refresh"), device)
    else:
        model = RewardModel.from_decoder(policy.decoder)
    needed = plan_stage_memory(model.config, token_budget=spec.token_budget, cache=CacheSettings(device.type))
    memory = require_memory(needed, workspace.job.resources)
    paths = [workspace.input(name) for name in ("data", "replay") if workspace.has_input(name)]
    reader = spec.reader(policy.tokenizer, model.config)
    data = PreferenceData.load(paths, reader, workspace.job.seed, spec.validation)
    workspace.log(f"data: {reader.describe()}")
    learner = Learner(model, spec, ranks=join_ranks(workspace, device, model))
    trained = learner.trained
    assert isinstance(trained, RewardModel)
    before = score_figures(score_pairs(model, data.train, spec.token_budget), data.train)
    loop = TrainingLoop(workspace, learner, spec)

    def step(done: int, watch: Stopwatch) -> StepReport:
        with watch.measure("learning"):
            pairs = data.batch(done, spec.batch_size)
            objective = RewardObjective(trained, len(pairs), spec.centre, learner.ranks)
            batches = pack_pairs(append_scored_tokens(pairs), spec.token_budget)
            figures = learner.forward_backward_custom(batches, objective)
            figures |= objective.figures(pairs) | learner.optim_step(learning_rate(spec, done, spec.steps))
            if data.validation and ((done + 1) % spec.validate_every == 0 or done + 1 == spec.steps):
                scores = score_pairs(model, data.validation, spec.token_budget)
                validated = score_figures(scores, data.validation)
                figures |= {f"validation_{name}": validated[name] for name in ("accuracy", "margin")}
        progress = {"loss": figures["loss"], "accuracy": figures["accuracy"]}
        return StepReport(figures, progress, {"tokens": figures["tokens"]})

    loop.run(step)
    held_out: dict[str, Any] = {}
    if data.validation:
        scores = score_pairs(model, data.validation, spec.token_budget)
        right = (scores[:, 0] > scores[:, 1]).astype(float)
        held_out = score_figures(scores, data.validation) | {
            "accuracy": pass_rate_interval(right.tolist(), seed=workspace.job.seed)._asdict()
        }
    return loop.finish(Policy(model, policy.tokenizer), save_reward_model) | {
        "algorithm": "bradley_terry",
        "pairs": len(data.train),
        "data": reader.figures(),
        **reader.noted(),
        "validation_pairs": len(data.validation),
        **mean_first_and_last(workspace.step_metrics(), ("loss", "accuracy", "margin")),
        "accuracy_before": before["accuracy"],
        "validation": held_out,
        "memory": memory_figures(memory, device),
    }
