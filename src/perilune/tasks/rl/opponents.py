"""The policy plays alone: what the RL loop asks of a league, for a stage that has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perilune.learn.weights import WeightedGroup
from perilune.models.adapters.files import save_policy
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.worker import RolloutWorker


class NoOpponents:
    """The policy plays every seat. `perilune.tasks.selfplay.league.League` overrides all of this.

    Attributes:
        rollouts: the worker that plays the stage's episodes.
    """

    def __init__(self, rollouts: RolloutWorker) -> None:
        self.rollouts = rollouts

    def after(
        self, step: int, groups: Sequence[WeightedGroup], figures: Mapping[str, float]
    ) -> Mapping[str, float]:
        """Add to the figures of a step that has just been learned from."""
        return figures

    def write(self, path: Path, decoder: Decoder, tokenizer: Tokenizer) -> None:
        """Write the stage's final policy."""
        save_policy(path, decoder, tokenizer)

    def summary(self) -> Mapping[str, Any]:
        """Add to the stage's summary."""
        return {}
