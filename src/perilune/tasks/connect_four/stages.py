"""The Connect Four stages: a small network learns by self-play, and a player is judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from perilune.bundle.job import Job
from perilune.tasks.connect_four.specs import ConnectFourJudgeSpec, ConnectFourSpec
from perilune.tasks.stage.stage import Stage

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace


class ConnectFour(Stage[ConnectFourSpec]):
    """Self-play with proximal policy optimisation, or with search."""

    name = "connect_four"
    spec = ConnectFourSpec
    produces = "player"
    standalone = True

    def describe(self, spec: ConnectFourSpec, job: Job) -> Mapping[str, object]:
        """Moves, updates and the learning rate."""
        learning = spec.learning
        a_step = learning.games * learning.moves
        played = f"{spec.steps} steps x {learning.games} games x {learning.moves}"
        return {
            "moves": f"{played} = {spec.steps * a_step:,}",
            "updates": f"{learning.epochs} x {-(-a_step // learning.minibatch)} a step",
            "learning rate": f"{learning.lr:g} falling to {learning.lr * learning.final_lr:g}",
        }

    def execute(self, spec: ConnectFourSpec, workspace: Workspace) -> dict[str, Any]:
        """Play, learn, and write the player."""
        from perilune.tasks.connect_four.training import run

        return run(workspace, spec)


class ConnectFourJudge(Stage[ConnectFourJudgeSpec]):
    """Share of best moves, share of blunders, and results with intervals."""

    name = "connect_four_judge"
    spec = ConnectFourJudgeSpec
    produces = "evaluation"
    output = "artifacts/summary.json"
    standalone = True

    def describe(self, spec: ConnectFourJudgeSpec, job: Job) -> Mapping[str, object]:
        """What is compared and played."""
        return {
            "moves": f"{41 - spec.first_ply} plies x {spec.positions} positions, each column solved",
            "games": f"{spec.games} against each of {', '.join(spec.opponents)}",
            "looking ahead": ", ".join(str(count) for count in spec.simulations),
        }

    def execute(self, spec: ConnectFourJudgeSpec, workspace: Workspace) -> dict[str, Any]:
        """Judge the player."""
        from perilune.tasks.connect_four.judge import run

        return run(workspace, spec)


training = ConnectFour()
judge = ConnectFourJudge()
