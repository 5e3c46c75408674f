"""Who has the seats that the policy does not have: a policy that is frozen."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from perilune.engine.backend import SamplingBackend
from perilune.learn.weights import WeightedGroup
from perilune.models.adapters.files import save_policy
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from perilune.rollout.worker import RolloutWorker


class Opponents(Protocol):
    """Somebody else at the table.

    Attributes:
        engine: samples their turns; what it samples is never learned from.
    """

    @property
    def engine(self) -> SamplingBackend: ...

    def prepare(self, step: int) -> None:
        """Be who plays at this step; called before its games, perhaps more than once."""
        ...

    def seats(self, key: tuple[int, int, int], players: int) -> Collection[int]:
        """The seats they have in all games of the task at (seed, step, place in the step)."""
        ...


@dataclass(frozen=True)
class Rivals:
    """They have all seats but one in every game; which one the policy has changes from task to task."""

    engine: SamplingBackend

    def prepare(self, step: int) -> None:
        """They are always the same."""

    def seats(self, key: tuple[int, int, int], players: int) -> Collection[int]:
        """All but that of the task's place."""
        return {seat for seat in range(players) if seat != key[2] % players}


class Alone:
    """Nobody plays but the policy that learns."""

    def __init__(self, rollouts: RolloutWorker) -> None:
        self.rollouts = rollouts

    def after(
        self, step: int, groups: Sequence[WeightedGroup], figures: Mapping[str, float]
    ) -> Mapping[str, float]:
        """The figures as they are."""
        return figures

    def write(self, path: Path, decoder: Decoder, tokenizer: Tokenizer) -> None:
        """Write the policy as it is."""
        save_policy(path, decoder, tokenizer)

    def summary(self) -> Mapping[str, Any]:
        """There is nothing to add."""
        return {}
