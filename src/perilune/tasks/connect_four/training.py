"""The loop of connect_four: self-play and updates, then the player is written."""

from typing import Any

from perilune.bundle.workspace import Workspace
from perilune.games.connect_four.learning import Trainer
from perilune.games.connect_four.network import save_player
from perilune.rollout.timing import Stopwatch
from perilune.tasks.connect_four.stages import ConnectFourSpec
from perilune.tasks.stage.policy import prepare_device
from perilune.tasks.stage.training import StepReport, TrainingLoop, write_final_checkpoint


def run(workspace: Workspace, spec: ConnectFourSpec) -> dict[str, Any]:
    """Train the player and return the stage's summary."""
    prepare_device(workspace)
    trainer = Trainer(spec.learning, workspace.job.seed)
    loop = TrainingLoop(workspace, trainer, spec)

    def step(done: int, watch: Stopwatch) -> StepReport:
        figures = trainer.advance(done / spec.steps)
        watch.sampling, watch.learning = figures.pop("play_seconds"), figures.pop("learn_seconds")
        rate = {"moves_per_second": figures["moves"] / (watch.sampling + watch.learning)}
        return StepReport(figures, {"entropy": figures["entropy"], **rate}, rate)

    loop.run(step)
    write_final_checkpoint(
        workspace, trainer, spec.steps, lambda directory: save_player(directory, trainer.network)
    )
    lines = workspace.metrics()
    return {
        "kind": "training",
        "steps": spec.steps,
        "parameters": sum(parameter.numel() for parameter in trainer.network.parameters()),
        "moves": int(sum(line["moves"] for line in lines)),
        "games": int(sum(line["games"] for line in lines)),
        "entropy": lines[-1]["entropy"],
    }
