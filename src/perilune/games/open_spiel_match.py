"""An OpenSpiel game in progress. Chance events are resolved, and one player moves at a time."""

from __future__ import annotations

import bisect
import math
from copy import copy
from importlib import import_module
from itertools import accumulate
from typing import Any

from perilune.environments.core.keyed_random import KeyedRandom
from perilune.errors import requires_extra


def load_pyspiel() -> Any:
    """Return the module pyspiel.

    Raises:
        RequestError: if OpenSpiel is not installed.
    """
    with requires_extra("games", "OpenSpiel is not installed", where="environment.id"):
        return import_module("pyspiel")


def is_simultaneous(game: Any) -> bool:
    """Return whether players of the game move at the same time."""
    return bool(game.get_type().dynamics == load_pyspiel().GameType.Dynamics.SIMULTANEOUS)


class Match:
    """One game.

    In a game with simultaneous moves, players are asked one after another, and the moves are applied once all
    are known.

    Attributes:
        state: pyspiel's state, without moves that are not applied yet.
    """

    def __init__(self, game: Any, rng: KeyedRandom) -> None:
        self.state = game.new_initial_state()
        self._rng = rng
        self._chosen: list[int] = []
        self._resolve_chance()

    def copy(self) -> Match:
        """Return the same game, which continues on its own."""
        twin = copy(self)
        twin.state, twin._chosen = self.state.clone(), [*self._chosen]
        return twin

    @property
    def is_over(self) -> bool:
        """True if the game has ended."""
        return bool(self.state.is_terminal())

    @property
    def player(self) -> int:
        """The player to move, from 0."""
        return len(self._chosen) if self.state.is_simultaneous_node() else int(self.state.current_player())

    @property
    def turn(self) -> tuple[str, int, int]:
        """A unique name of this turn, for random draws."""
        return ("move", self.player, len(self.state.full_history()))

    @property
    def returns(self) -> list[float]:
        return [float(value) for value in self.state.returns()]

    def take(self, action: int) -> None:
        """Apply a legal move of the player to move."""
        if not self.state.is_simultaneous_node():
            self.state.apply_action(action)
            self._resolve_chance()
            return
        self._chosen.append(action)
        if len(self._chosen) == self.state.num_players():
            self.state.apply_actions(self._chosen)
            self._chosen = []
            self._resolve_chance()

    def _resolve_chance(self) -> None:
        while self.state.is_chance_node():
            actions, probabilities = zip(*self.state.chance_outcomes(), strict=True)
            point = self._rng.uniform("chance", len(self.state.full_history()))
            self.state.apply_action(sample_action(actions, probabilities, point))


def sample_action(actions: tuple[int, ...], probabilities: tuple[float, ...], point: float) -> int:
    """Return the action at which the cumulative probability exceeds `point`, in [0, 1)."""
    index = bisect.bisect(list(accumulate(probabilities)), point * math.fsum(probabilities))
    return int(actions[min(index, len(actions) - 1)])
