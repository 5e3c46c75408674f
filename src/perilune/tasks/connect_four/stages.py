"""The Connect Four stages: train a small network by self-play, and evaluate a player."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from perilune.bundle.job import Job
from perilune.bundle.plugin import Consumes
from perilune.frozen import Frozen
from perilune.games.connect_four.learning_settings import LearningSettings
from perilune.plural import plural
from perilune.tasks.stage.retention import Keep, KeepNewest, TrainingSpec
from perilune.tasks.stage.stage import Stage

Opponent = Literal[
    "random", "one_ply", "foresight_2", "foresight_4", "foresight_6", "mcts_100", "mcts_1000", "perfect"
]


class ConnectFourSpec(TrainingSpec):
    """Fields of a connect_four stage."""

    steps: int = Field(60, ge=1, description="training steps; each plays games and updates the network")
    save_every: int = Field(20, ge=1, description="steps between checkpoints to resume from")
    keep: KeepNewest = Field(Keep(), description="which checkpoints to keep")
    learning: LearningSettings = Field(LearningSettings(), description="network and algorithm")


class ConnectFourJudgeSpec(Frozen):
    """Fields of a connect_four_judge stage."""

    player: Annotated[str, Consumes("player")] = Field(description="stage whose player to evaluate")
    simulations: tuple[int, ...] = Field(
        (0, 100),
        min_length=1,
        description="numbers of search simulations per move; the player is evaluated with each of them."
        " 0: no search",
    )
    positions: int = Field(10, ge=2, description="positions per ply in which the solver evaluates every move")
    first_ply: int = Field(
        12,
        ge=8,
        le=40,
        description="number of stones in the earliest of the `positions`, and in openings against the"
        " opponent `perfect`",
    )
    games: int = Field(
        100, ge=2, description="games against each opponent; each opening is played from both sides"
    )
    opponents: tuple[Opponent, ...] = Field(
        ("random", "one_ply", "foresight_2", "foresight_4", "perfect"), description="opponents to play"
    )


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
