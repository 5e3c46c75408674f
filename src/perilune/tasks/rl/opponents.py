"""The opponents of an RL stage without any, and the interface that a league overrides."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perilune.learn.weights import WeightedGroup
from perilune.models.adapters.files import save_policy
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.worker import RolloutWorker


class NoOpponents:
    """The policy is every player. `perilune.tasks.selfplay.league.League` overrides these methods.

    Attributes:
        rollouts: the worker that samples the stage's episodes.
        moves_reference: whether the reference policy changes during the stage.
    """

    moves_reference = False

    def __init__(self, rollouts: RolloutWorker) -> None:
        self.rollouts = rollouts

    def after(
        self, step: int, groups: Sequence[WeightedGroup], figures: dict[str, float]
    ) -> dict[str, float]:
        """Called after each step's update; returns the step's metrics, possibly with more of them."""
        return figures

    def move_reference(self, reference: Decoder | None) -> bool:
        """Called before each step's update; returns whether it changed the reference policy."""
        return False

    def write(self, path: Path, decoder: Decoder, tokenizer: Tokenizer) -> None:
        """Write the stage's final policy."""
        save_policy(path, decoder, tokenizer)

    def summary(self) -> Mapping[str, Any]:
        """Further entries of the stage's summary."""
        return {}
