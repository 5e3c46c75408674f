"""Opponents: frozen policies that sample the turns of some players."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from perilune.engine.backend import SamplingBackend


class Opponents(Protocol):
    """Policies that take part in the episodes and are not trained.

    Attributes:
        engine: samples the turns of the opponents, which are never trained on.
    """

    @property
    def engine(self) -> SamplingBackend: ...

    def prepare(self, step: int) -> None:
        """Load the opponent of a step. Called before the step's rollouts, possibly more than once."""

    def opponent_players(self, key: tuple[int, int, int], players: int) -> Collection[int]:
        """Return the opponents' players in all rollouts of the task at (seed, step, index in the step)."""


@dataclass(frozen=True)
class FixedOpponents:
    """One policy for all players but one; the policy's own player alternates from task to task."""

    engine: SamplingBackend

    def prepare(self, step: int) -> None:
        """Do nothing: the opponent never changes."""

    def opponent_players(self, key: tuple[int, int, int], players: int) -> Collection[int]:
        """Return all players but the one at the task's index modulo `players`."""
        return {player for player in range(players) if player != key[2] % players}
