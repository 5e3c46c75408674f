"""The loop of sft: supervised fine-tuning on verified traces."""

from functools import partial
from typing import Any

from perilune.bundle.machine import require_memory
from perilune.bundle.workspace import Workspace
from perilune.learn.algorithms import algorithm
from perilune.learn.batch import pack
from perilune.learn.schedules import learning_rate
from perilune.learn.trainer import Learner
from perilune.rollout.timing import Stopwatch
from perilune.tasks.stage.memory_plan import memory_figures
from perilune.tasks.stage.policy import join_ranks, load_policy, prepare_device
from perilune.tasks.stage.training import StepReport, TrainingLoop, mean_first_and_last
from perilune.tasks.supervised.demonstrations import Demonstrations
from perilune.tasks.supervised.held_out import episode_values
from perilune.tasks.supervised.stages import SFTSpec, plan_memory


def run(workspace: Workspace, spec: SFTSpec) -> dict[str, Any]:
    """Train on the traces and return the stage's summary."""
    device = prepare_device(workspace)
    policy = load_policy(workspace, device, spec)
    config = policy.decoder.config
    needed = plan_memory(spec, workspace.job, config, device.type)
    memory = require_memory(needed, workspace.job.resources)
    learner = Learner(policy.decoder, spec, ranks=join_ranks(workspace, device, policy.decoder))
    reader = spec.reader(policy.tokenizer, config)
    demonstrations = Demonstrations(
        [workspace.input("data")], reader, workspace.job.seed, validation=spec.validation
    )
    workspace.log(f"data: {reader.describe()}")
    weight_groups = algorithm("sft")
    validation = demonstrations.held_out
    held_out = partial(episode_values, policy.decoder, validation, spec.token_budget) if validation else None
    loop = TrainingLoop(workspace, learner, spec, policy, held_out=held_out)

    def step(done: int, watch: Stopwatch) -> StepReport:
        with watch.measure("learning"):
            episodes = demonstrations.batch(done, spec.batch_size)
            figures = learner.forward_backward(
                pack([weight_groups(episodes, max_tokens=0)], spec.token_budget)
            )
            figures |= learner.optim_step(learning_rate(spec, done, spec.steps))
        progress = {"loss": figures["loss"], "lr": figures["lr"]}
        return StepReport(figures, progress, {"tokens": figures["tokens"]})

    loop.run(step)
    return loop.finish(policy) | {
        "algorithm": "sft",
        "traces": len(demonstrations),
        **({"validation_traces": len(validation)} if validation else {}),
        "data": reader.figures(),
        **reader.noted(),
        **mean_first_and_last(workspace.step_metrics(), ("loss",)),
        "memory": memory_figures(memory, device),
    }
