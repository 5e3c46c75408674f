"""A game of OpenSpiel under way: chance has moved, and one player is asked at a time."""

from __future__ import annotations

import bisect
import math
from importlib import import_module
from itertools import accumulate
from typing import Any

from perilune.environments.core.keyed_random import KeyedRandom
from perilune.errors import RequestError


def pyspiel() -> Any:
    """OpenSpiel.

    Raises:
        RequestError: when it is not installed.
    """
    try:
        return import_module("pyspiel")
    except ImportError:
        raise RequestError(
            "OpenSpiel is not installed", where="environment.id", remedy="pip install 'perilune[games]'"
        ) from None


def is_simultaneous(game: Any) -> bool:
    """Whether players of the game move at the same time."""
    return bool(game.get_type().dynamics == pyspiel().GameType.Dynamics.SIMULTANEOUS)


class Match:
    """One game from its deal to its end.

    Players who move at the same time are asked one after another, and the moves are made when all are known.

    Attributes:
        state: of pyspiel; the moves that are not made yet are not in it.
    """

    def __init__(self, game: Any, rng: KeyedRandom) -> None:
        self.state = game.new_initial_state()
        self._rng = rng
        self._chosen: list[int] = []
        self._let_chance_move()

    @property
    def over(self) -> bool:
        """Whether nobody moves any more."""
        return bool(self.state.is_terminal())

    @property
    def player(self) -> int:
        """Who is asked, from 0."""
        return len(self._chosen) if self.state.is_simultaneous_node() else int(self.state.current_player())

    @property
    def turn(self) -> tuple[str, int, int]:
        """A name of this turn, which no other of the game has, for draws of chance."""
        return ("move", self.player, len(self.state.full_history()))

    @property
    def returns(self) -> list[float]:
        """What the game was worth to each player."""
        return [float(value) for value in self.state.returns()]

    def take(self, action: int) -> None:
        """Let the player who is asked make this legal move."""
        if not self.state.is_simultaneous_node():
            self.state.apply_action(action)
            self._let_chance_move()
            return
        self._chosen.append(action)
        if len(self._chosen) == self.state.num_players():
            self.state.apply_actions(self._chosen)
            self._chosen = []
            self._let_chance_move()

    def _let_chance_move(self) -> None:
        while self.state.is_chance_node():
            actions, probabilities = zip(*self.state.chance_outcomes(), strict=True)
            point = self._rng.uniform("chance", len(self.state.full_history()))
            self.state.apply_action(drawn(actions, probabilities, point))


def drawn(actions: tuple[int, ...], probabilities: tuple[float, ...], point: float) -> int:
    """The action at which the cumulated probabilities pass `point`, in [0, 1)."""
    place = bisect.bisect(list(accumulate(probabilities)), point * math.fsum(probabilities))
    return int(actions[min(place, len(actions) - 1)])
