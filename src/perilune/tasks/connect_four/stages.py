"""The Connect Four stages: train a small network by self-play, and evaluate a player."""

from collections.abc import Mapping

from perilune.bundle.job import Job
from perilune.plural import plural
from perilune.tasks.connect_four.specs import ConnectFourJudgeSpec, ConnectFourSpec
from perilune.tasks.stage.stage import Stage


class ConnectFour(Stage[ConnectFourSpec]):
    """Trains by self-play, with proximal policy optimization or with search."""

    name = "connect_four"
    spec = ConnectFourSpec
    loop = "perilune.tasks.connect_four.training"
    produces = "player"
    standalone = True

    def describe(self, spec: ConnectFourSpec, job: Job) -> Mapping[str, object]:
        learning = spec.learning
        step_moves = learning.games * learning.moves
        played = f"{plural(spec.steps, 'step')} x {plural(learning.games, 'game')} x {learning.moves}"
        return {
            "moves": f"{played} = {spec.steps * step_moves:,}",
            "updates": f"{learning.epochs} x {-(-step_moves // learning.minibatch)} a step",
            "learning rate": f"{learning.lr:g} falling to {learning.lr * learning.final_lr:g}",
        }


class ConnectFourJudge(Stage[ConnectFourJudgeSpec]):
    """Measures the shares of best moves and of blunders, and match results with intervals."""

    name = "connect_four_judge"
    spec = ConnectFourJudgeSpec
    loop = "perilune.tasks.connect_four.judge"
    produces = "evaluation"
    output = "artifacts/summary.json"
    standalone = True

    def describe(self, spec: ConnectFourJudgeSpec, job: Job) -> Mapping[str, object]:
        return {
            "moves": f"{41 - spec.first_ply} plies x {spec.positions} positions, each column solved",
            "games": f"{spec.games} against each of {', '.join(spec.opponents)}",
            "looking ahead": ", ".join(str(count) for count in spec.simulations),
        }


training = ConnectFour()
judge = ConnectFourJudge()
