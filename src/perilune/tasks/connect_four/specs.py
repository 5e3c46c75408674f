"""The fields of the Connect Four stages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from perilune.bundle.job import Frozen
from perilune.bundle.plugin import Consumes
from perilune.games.connect_four.learning_settings import LearningSettings
from perilune.tasks.stage.retention import Saving

Opponent = Literal[
    "random", "one_ply", "foresight_2", "foresight_4", "foresight_6", "mcts_100", "mcts_1000", "perfect"
]


class ConnectFourSpec(Saving):
    """Fields of a connect_four stage."""

    steps: int = Field(60, ge=1, description="stretches of self-play, each learned from")
    save_every: int = Field(20, ge=1, description="steps between two checkpoints to resume from")
    learning: LearningSettings = Field(LearningSettings(), description="network and algorithm")


class ConnectFourJudgeSpec(Frozen):
    """Fields of a connect_four_judge stage."""

    player: Annotated[str, Consumes("player")] = Field(description="stage whose player is judged")
    simulations: tuple[int, ...] = Field(
        (0, 100), min_length=1, description="how far it looks ahead, one judgement each; 0 is not at all"
    )
    positions: int = Field(10, ge=2, description="positions of each ply whose columns the solver compares")
    first_ply: int = Field(
        12, ge=8, le=40, description="stones on the first of them, and on boards that perfect play is met on"
    )
    games: int = Field(100, ge=2, description="games against each opponent, every opening from both sides")
    opponents: tuple[Opponent, ...] = Field(
        ("random", "one_ply", "foresight_2", "foresight_4", "perfect"), description="who is played against"
    )
