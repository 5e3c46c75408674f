"""Who has the seats that the policy does not have: a policy that is frozen."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from perilune.engine.backend import SamplingBackend

if TYPE_CHECKING:
    pass


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
