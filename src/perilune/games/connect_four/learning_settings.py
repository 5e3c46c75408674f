"""Settings of self-play training, without torch."""

from pydantic import Field

from perilune.frozen import Frozen


class LearningSettings(Frozen):
    """Settings of self-play training."""

    channels: int = Field(64, ge=1, description="channels of the network's convolution")
    hidden: int = Field(256, ge=1, description="width of the network's layers")
    games: int = Field(1024, ge=1, description="games played in parallel")
    moves: int = Field(32, ge=1, description="moves played in each game per training step")
    epochs: int = Field(2, ge=1, description="epochs over the moves of a step")
    minibatch: int = Field(4096, ge=1, description="moves per update")
    lr: float = Field(2e-3, gt=0, le=10, description="initial learning rate")
    final_lr: float = Field(
        0.05, ge=0, le=1, description="final learning rate divided by `lr`; the decay is linear"
    )
    simulations: int = Field(
        0,
        ge=0,
        description="search simulations per move, whose results the network learns; 0: PPO without search",
    )
    opening: int = Field(24, ge=0, le=36, description="maximum number of random moves at the start of a game")
    trace: float = Field(0.9, ge=0, le=1, description="lambda of generalized advantage estimation")
    clip: float = Field(0.2, gt=0, description="PPO's bound on the importance ratio")
    entropy: float = Field(
        0.01, ge=0, description="initial coefficient of PPO's entropy bonus, which falls linearly to 0"
    )
