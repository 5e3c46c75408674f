"""connect_four: a small network learns Connect Four by playing against itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from perilune.bundle.job import Job
from perilune.games.connect_four.learning_settings import LearningSettings
from perilune.tasks.stage.retention import Saving

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace

CLOCKED = ("play_seconds", "learn_seconds")


class ConnectFourSpec(Saving):
    """Fields of a connect_four stage."""

    steps: int = Field(60, ge=1, description="stretches of self-play, each learned from")
    save_every: int = Field(20, ge=1, description="steps between two checkpoints to resume from")
    learning: LearningSettings = Field(LearningSettings(), description="network and algorithm")


class ConnectFour:
    """Self-play with proximal policy optimisation."""

    name = "connect_four"
    spec = ConnectFourSpec
    produces = "player"
    output = "artifacts/checkpoints/final"
    standalone = True

    def plan(self, job: Job) -> Mapping[str, object]:
        """How much is played and learned from."""
        spec = ConnectFourSpec.model_validate(job.spec)
        learning = spec.learning
        a_step = learning.games * learning.moves
        played = f"{spec.steps} steps x {learning.games} games x {learning.moves}"
        return {
            "moves": f"{played} = {spec.steps * a_step:,}",
            "updates": f"{learning.epochs} x {-(-a_step // learning.minibatch)} a step",
            "learning rate": f"{learning.lr:g} falling to {learning.lr * learning.final_lr:g}",
        }

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Play, learn, and write the player."""
        from perilune.games.connect_four.learning import Trainer
        from perilune.games.connect_four.network import save_player
        from perilune.tasks.stage.policy import prepare_device
        from perilune.tasks.stage.retention import FINAL
        from perilune.tasks.stage.training import OPTIMIZER, put_in_place, resume, save_when_due

        spec = ConnectFourSpec.model_validate(workspace.job.spec)
        prepare_device(workspace)
        trainer = Trainer(spec.learning, workspace.job.seed)
        for step in range(resume(workspace, trainer), spec.steps):
            figures = trainer.advance(step / spec.steps)
            seconds = {name: figures.pop(name) for name in CLOCKED}
            rate = figures["moves"] / sum(seconds.values())
            workspace.metric(step + 1, **figures)
            workspace.timing(step + 1, **seconds, moves_per_second=rate)
            workspace.progress(step + 1, spec.steps, entropy=figures["entropy"], moves_per_second=rate)
            save_when_due(workspace, trainer, step + 1, spec)
        if not (workspace.root / self.output).exists():
            partial = workspace.checkpoints / f".{FINAL}.partial"
            save_player(partial, trainer.network)
            trainer.save_state(partial / OPTIMIZER, {"step": spec.steps})
            put_in_place(partial, workspace.root / self.output)
        lines = workspace.metrics()
        return {
            "kind": "training",
            "steps": spec.steps,
            "parameters": sum(parameter.numel() for parameter in trainer.network.parameters()),
            "moves": int(sum(line["moves"] for line in lines)),
            "games": int(sum(line["games"] for line in lines)),
            "entropy": lines[-1]["entropy"],
        }


plugin = ConnectFour()
