"""How a player learns: the numbers, in one place, without torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class LearningSettings(BaseModel):
    """How a player learns."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    channels: int = Field(64, ge=1, description="what the network's convolution looks for")
    hidden: int = Field(256, ge=1, description="width of the network's layers")
    games: int = Field(1024, ge=1, description="games played side by side")
    moves: int = Field(32, ge=1, description="moves of each between two updates")
    epochs: int = Field(2, ge=1, description="times that each move is learned from")
    minibatch: int = Field(4096, ge=1, description="moves an optimizer step")
    lr: float = Field(2e-3, gt=0, description="learning rate at the beginning")
    final_lr: float = Field(
        0.05, ge=0, le=1, description="last learning rate over the first; falls in a line"
    )
    simulations: int = Field(
        0, ge=0, description="how far each move is searched; it then learns what the search found; 0 is PPO"
    )
    opening: int = Field(24, ge=0, le=36, description="a game starts after up to so many random moves")
    trace: float = Field(0.9, ge=0, le=1, description="lambda of the advantages")
    clip: float = Field(0.2, gt=0, description="how far a probability's ratio counts, of PPO")
    entropy: float = Field(0.01, ge=0, description="weight of the entropy at the beginning, of PPO")
