"""The fields of the Connect Four stages."""

from typing import Annotated, Literal

from pydantic import Field

from perilune.bundle.plugin import Consumes
from perilune.frozen import Frozen
from perilune.games.connect_four.learning_settings import LearningSettings
from perilune.tasks.stage.retention import TrainingSpec

Opponent = Literal[
    "random", "one_ply", "foresight_2", "foresight_4", "foresight_6", "mcts_100", "mcts_1000", "perfect"
]


class ConnectFourSpec(TrainingSpec):
    """Fields of a connect_four stage."""

    steps: int = Field(60, ge=1, description="training steps; each plays games and updates the network")
    save_every: int = Field(20, ge=1, description="steps between checkpoints to resume from")
    learning: LearningSettings = Field(LearningSettings(), description="network and algorithm")


class ConnectFourJudgeSpec(Frozen):
    """Fields of a connect_four_judge stage."""

    player: Annotated[str, Consumes("player")] = Field(description="stage whose player to evaluate")
    simulations: tuple[int, ...] = Field(
        (0, 100), min_length=1, description="search simulations per move, evaluated one by one; 0: no search"
    )
    positions: int = Field(10, ge=2, description="positions per ply in which the solver evaluates every move")
    first_ply: int = Field(
        12,
        ge=8,
        le=40,
        description="stones in the earliest of these positions, and in openings against `perfect`",
    )
    games: int = Field(100, ge=2, description="games against each opponent; each opening from both sides")
    opponents: tuple[Opponent, ...] = Field(
        ("random", "one_ply", "foresight_2", "foresight_4", "perfect"), description="opponents to play"
    )
