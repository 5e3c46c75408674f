"""The loop of preference: preference optimization on pairs (DPO, IPO)."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from perilune.bundle.machine import require_memory
from perilune.bundle.workspace import Workspace
from perilune.errors import WorkFailedError
from perilune.learn.batch import Pair, pack_pairs
from perilune.learn.distributed import SINGLE_RANK, Ranks
from perilune.learn.preference import (
    PreferenceObjective,
    add_reference_to_pairs,
    evaluate_pairs,
    preference_loss,
)
from perilune.learn.schedules import learning_rate
from perilune.learn.trainer import Learner
from perilune.metrics.health.learning import CHOSEN_COLLAPSE_STEPS
from perilune.models.decoder import Decoder
from perilune.rollout.timing import Stopwatch
from perilune.tasks.stage.memory_plan import memory_figures
from perilune.tasks.stage.policy import join_ranks, load_policy, prepare_device
from perilune.tasks.stage.training import StepReport, TrainingLoop, mean_first_and_last
from perilune.tasks.supervised.held_out import pair_values
from perilune.tasks.supervised.preference_data import PreferenceData
from perilune.tasks.supervised.stages import PreferenceSpec, plan_memory

REFERENCE_LIMIT = 1e-2  # nats per token between two forward passes of the same weights
VALIDATED = ("loss", "accuracy", "margin", "chosen_shift", "chosen_nll")


def run(workspace: Workspace, spec: PreferenceSpec) -> dict[str, Any]:
    """Train on the pairs and return the stage's summary."""
    device = prepare_device(workspace)
    policy = load_policy(workspace, device, spec)
    config = policy.decoder.config
    needed = plan_memory(spec, workspace.job, config, device.type)
    memory = require_memory(needed, workspace.job.resources)
    reader = spec.reader(policy.tokenizer, config)
    pairs = PreferenceData.load([workspace.input("data")], reader, workspace.job.seed, spec.validation)
    workspace.log(f"data: {reader.describe()}")
    ranks = join_ranks(workspace, device, policy.decoder)
    data = PreferenceData(
        add_reference_to_pairs(pairs.train, policy.decoder, spec.token_budget, ranks),
        add_reference_to_pairs(pairs.validation, policy.decoder, spec.token_budget, ranks),
        pairs.seed,
    )
    learner = Learner(policy.decoder, spec, ranks=ranks)
    of_pairs = partial(preference_loss, kind=spec.loss, beta=spec.beta, nll=spec.nll, dpop=spec.dpop)
    held_out = partial(pair_values, policy.decoder, data.validation, of_pairs, spec.token_budget)
    loop = TrainingLoop(workspace, learner, spec, policy, held_out=held_out if data.validation else None)
    alarm = CollapseAlarm(workspace)

    def objective(batch: Sequence[Pair], decoder: Decoder, ranks: Ranks) -> PreferenceObjective:
        return PreferenceObjective(
            decoder, spec.loss, spec.beta, len(batch), nll=spec.nll, dpop=spec.dpop, ranks=ranks
        )

    def validation() -> dict[str, float]:
        scores = evaluate_pairs(
            objective(data.validation, policy.decoder, SINGLE_RANK), data.validation, spec.token_budget
        )
        return {f"validation_{name}": scores[name] for name in VALIDATED}

    def step(done: int, watch: Stopwatch) -> StepReport:
        with watch.measure("learning"):
            batch = data.batch(done, spec.batch_size)
            loss = objective(batch, learner.trained, learner.ranks)
            figures = learner.forward_backward_custom(pack_pairs(batch, spec.token_budget), loss)
            if done == 0:
                _require_same_policy(loss)
            figures |= loss.figures() | learner.optim_step(learning_rate(spec, done, spec.steps))
            if data.validation and ((done + 1) % spec.validate_every == 0 or done + 1 == spec.steps):
                figures |= validation()
        alarm.observe(done + 1, figures)
        progress = {"loss": figures["loss"], "accuracy": figures["accuracy"]}
        return StepReport(figures, progress, {"tokens": figures["tokens"]})

    loop.run(step)
    lines = workspace.step_metrics()
    validated = {name: value for name, value in lines[-1].items() if name.startswith("validation_")}
    if data.validation and not validated:  # an evaluation ended the stage between two validations
        validated = validation()
    return loop.finish(policy) | {
        "algorithm": spec.loss,
        "pairs": len(data.train),
        "data": reader.figures(),
        **reader.noted(),
        "validation_pairs": len(data.validation),
        **mean_first_and_last(lines, ("loss", "accuracy", "margin", "chosen_shift", "chosen_nll")),
        "validation": validated,
        "collapse_step": alarm.step,
        "memory": memory_figures(memory, device),
    }


def _require_same_policy(loss: PreferenceObjective) -> None:
    if loss.largest_shift > REFERENCE_LIMIT:
        raise WorkFailedError(
            f"policy and reference differ by {loss.largest_shift:.3g} nats per token before any update",
            where="step 1",
            remedy="use the checkpoint that training starts from as the reference, in the same precision",
        )


class CollapseAlarm:
    """Warns once when chosen answers become less likely for several consecutive steps.

    Create it after `TrainingLoop`: it counts the steps of earlier attempts too.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._in_a_row = 0
        self.step: int | None = None
        for line in workspace.step_metrics():
            self._count(line["step"], line)

    def observe(self, step: int, figures: Mapping[str, float]) -> None:
        """Count one step, and warn if it completes a collapse."""
        if self._count(step, figures):
            self._workspace.event("chosen_collapse", step=step, chosen_shift=figures["chosen_shift"])
            self._workspace.log(
                f"ALARM at step {step}: chosen answers have lost {-figures['chosen_shift']:.3f} nats per"
                " token while margins grew; lower lr, train less, set nll or dpop, or leave out pairs that"
                " are nearly equal"
            )

    def _count(self, step: int, figures: Mapping[str, float]) -> bool:
        self._in_a_row = self._in_a_row + 1 if figures["collapse"] else 0
        if self._in_a_row < CHOSEN_COLLAPSE_STEPS or self.step is not None:
            return False
        self.step = step
        return True
