"""The default opponents of an RL stage: none."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perilune.learn.weights import WeightedGroup
from perilune.models.adapters.files import save_policy
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.worker import RolloutWorker


class NoOpponents:
    """No opponents: the policy plays every player. `perilune.tasks.selfplay.league.League` overrides this.

    Attributes:
        rollouts: the worker that samples the stage's episodes.
        updates_reference: whether the reference policy changes during the stage.
    """

    updates_reference = False

    def __init__(self, rollouts: RolloutWorker) -> None:
        self.rollouts = rollouts

    def after_step(
        self, step: int, groups: Sequence[WeightedGroup], metrics: dict[str, float]
    ) -> dict[str, float]:
        """Return the step's metrics, possibly with more of them. Called after each step's update."""
        return metrics

    def update_reference(self, reference: Decoder | None) -> bool:
        """Update the reference policy, and return whether it changed. Called before each step's update."""
        return False

    def save_final(self, path: Path, decoder: Decoder, tokenizer: Tokenizer) -> None:
        """Write the stage's final policy."""
        save_policy(path, decoder, tokenizer)

    def summary(self) -> Mapping[str, Any]:
        """Return further entries of the stage's summary."""
        return {}
