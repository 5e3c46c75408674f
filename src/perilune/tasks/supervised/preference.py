"""preference: learn from pairs which answer is better (DPO, IPO)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from perilune.bundle.job import Job
from perilune.bundle.machine import require_memory
from perilune.bundle.plugin import Consumes
from perilune.learn.training_settings import LearnerSettings
from perilune.tasks.stage.learning_rates import describe_learning_rate, read_spec
from perilune.tasks.stage.retention import Saving, planned

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace

COLLAPSE_PATIENCE = 5  # steps in a row before the alarm: a single batch may look it
REFERENCE_LIMIT = 1e-2  # nats a token between two forwards of the same weights


class PreferenceSpec(Saving, LearnerSettings):
    """Fields of a preference stage."""

    checkpoint: Annotated[str, Consumes("checkpoint")] = Field(
        description="where the weights start; frozen, it is the reference too"
    )
    data: Annotated[str, Consumes("preferences")] = Field(description="stage whose pairs are learned from")
    loss: Literal["dpo", "dpo_norm", "ipo"] = Field(
        "dpo", description="dpo, dpo_norm (on means a token) or ipo (on means a token)"
    )
    beta: float = Field(0.1, gt=0, description="how hard the reference holds; tau of ipo")
    nll: float = Field(
        0.0, ge=0, description="weight of the chosen answer's own cross-entropy, against collapse"
    )
    dpop: float = Field(
        0.0, ge=0, description="weight of the hinge on the chosen answer's fall, against collapse"
    )
    steps: int = Field(100, ge=1, description="optimizer steps")
    batch_size: int = Field(32, ge=1, description="pairs a step")
    validation: float = Field(0.1, ge=0, lt=1, description="share of tasks whose pairs are held out")
    validate_every: int = Field(20, ge=1, description="steps between two looks at them")
    final_lr: float = Field(0.1, ge=0, le=1, description="last learning rate over peak; 1 is constant")
    save_every: int = Field(50, ge=1, description="steps between two checkpoints to resume from")


class Preference:
    """Direct preference optimisation, with the figures that tell when it only pushes answers away."""

    name = "preference"
    spec = PreferenceSpec
    produces = "checkpoint"
    output = "artifacts/checkpoints/final"
    parallel = True

    def plan(self, job: Job) -> Mapping[str, object]:
        """Pairs seen, the loss, the schedule and memory."""
        from perilune.tasks.stage.memory_plan import model_config, stage_memory

        spec = read_spec(PreferenceSpec, job)
        memory = stage_memory(model_config(job), token_budget=spec.token_budget, learner=spec)
        return {
            "pairs seen": f"{spec.steps} steps x {spec.batch_size} = {spec.steps * spec.batch_size:,}",
            "loss": f"{spec.loss}, beta {spec.beta:g}, the reference scored once",
            "learning rate": describe_learning_rate(spec, job),
            "checkpoints": planned(spec, memory),
            **spec.planned(),
            "memory": memory,
        }

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Pairs in, a checkpoint out."""
        from perilune.errors import WorkFailedError
        from perilune.learn.batch import Pair, pack_pairs
        from perilune.learn.distributed import SINGLE_RANK, Ranks
        from perilune.learn.preference import PreferenceObjective, evaluate_pairs, with_reference_logprobs
        from perilune.learn.schedules import learning_rate
        from perilune.learn.trainer import Learner
        from perilune.models.decoder import Decoder
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
        from perilune.tasks.supervised.preference_data import PreferenceData

        spec = read_spec(PreferenceSpec, workspace.job, workspace.log)
        device = prepare_device(workspace)
        policy = load_policy(workspace, device, spec)
        memory = require_memory(
            stage_memory(policy.decoder.config, token_budget=spec.token_budget, learner=spec),
            workspace.job.resources,
        )
        data = PreferenceData.load(
            [workspace.input("data")], policy.tokenizer, workspace.job.seed,
            policy.decoder.config.max_position_embeddings, spec.validation,
        )  # fmt: skip
        data = PreferenceData(
            with_reference_logprobs(data.train, policy.decoder, spec.token_budget),
            with_reference_logprobs(data.validation, policy.decoder, spec.token_budget),
            data.seed,
        )
        learner = Learner(policy.decoder, spec, ranks=join_ranks(workspace, device))
        restore_optimizer(workspace, learner, spec)

        def objective(pairs: Sequence[Pair], decoder: Decoder, ranks: Ranks) -> PreferenceObjective:
            return PreferenceObjective(
                decoder, spec.loss, spec.beta, len(pairs), nll=spec.nll, dpop=spec.dpop, ranks=ranks
            )

        first = resume(workspace, learner)
        alarm = CollapseAlarm(workspace)
        total_watch = Stopwatch()
        for step in range(first, spec.steps):
            watch = Stopwatch()
            pairs = data.batch(step, spec.batch_size)
            seen = objective(pairs, learner.trained, learner.ranks)
            figures = learner.forward_backward_custom(pack_pairs(pairs, spec.token_budget), seen)
            if step == 0 and seen.largest_shift > REFERENCE_LIMIT:
                raise WorkFailedError(
                    f"policy and reference differ by {seen.largest_shift:.3g} nats a token before any update",
                    where="step 1",
                    remedy="the reference must be the checkpoint that training starts from, in its precision",
                )
            figures |= seen.figures() | learner.optim_step(learning_rate(spec, step, spec.steps))
            if data.validation and ((step + 1) % spec.validate_every == 0 or step + 1 == spec.steps):
                every = objective(data.validation, policy.decoder, SINGLE_RANK)
                held = evaluate_pairs(every, data.validation, spec.token_budget)
                names = ("loss", "accuracy", "margin", "chosen_shift", "chosen_nll")
                figures |= {f"validation_{name}": held[name] for name in names}
            watch.learning = watch.elapsed
            workspace.metric(step + 1, **figures)
            workspace.timing(step + 1, **watch.figures(), tokens=figures["tokens"])
            workspace.progress(step + 1, spec.steps, loss=figures["loss"], accuracy=figures["accuracy"])
            alarm.look(step + 1, figures)
            save_when_due(workspace, learner, step + 1, spec)
        lines = workspace.metrics()
        return finish(workspace, policy, learner, spec) | {
            "algorithm": spec.loss,
            "pairs": len(data.train),
            "validation_pairs": len(data.validation),
            **first_and_last(lines, ("loss", "accuracy", "margin", "chosen_shift", "chosen_nll")),
            "validation": {
                name: value for name, value in lines[-1].items() if name.startswith("validation_")
            },
            "collapse_step": alarm.step,
            "seconds": total_watch.elapsed,
            "memory": memory_figures(memory, device),
        }


class CollapseAlarm:
    """Tells once when the chosen answers have been falling for a few steps in a row.

    Made after the workspace was rewound: steps of earlier attempts count.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._in_a_row = 0
        self.step: int | None = None
        for line in workspace.metrics():
            self._count(line["step"], line)

    def look(self, step: int, figures: Mapping[str, float]) -> None:
        """Take in one step."""
        if self._count(step, figures):
            self._workspace.event("chosen_collapse", step=step, chosen_shift=figures["chosen_shift"])
            self._workspace.log(
                f"ALARM at step {step}: chosen answers have lost {-figures['chosen_shift']:.3f} nats a token"
                " while margins grew; lower lr, train less, set nll or dpop, or drop pairs nearly alike"
            )

    def _count(self, step: int, figures: Mapping[str, float]) -> bool:
        self._in_a_row = self._in_a_row + 1 if figures["collapse"] else 0
        if self._in_a_row < COLLAPSE_PATIENCE or self.step is not None:
            return False
        self.step = step
        return True


plugin = Preference()
