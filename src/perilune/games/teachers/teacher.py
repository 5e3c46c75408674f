"""What a teacher of a game is: for what a player knows, how likely it plays each move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from perilune.environments.core.keyed_random import KeyedRandom
from perilune.games.open_spiel_match import Match, drawn


class GameTeacher(Protocol):
    """Plays one game of OpenSpiel.

    Attributes:
        name: what a recipe calls it, e.g. "cfr".
    """

    name: str

    def probabilities(self, state: Any, player: int, seed: int) -> Mapping[int, float]:
        """Of each legal action that it may take, by what `player` knows in `state`; they sum to 1.

        Args:
            state: of pyspiel, in which the player moves.
            seed: of whatever is drawn on the way; the same state and seed give the same.
        """
        ...


class Move(NamedTuple):
    """An action, and how likely it was."""

    action: int
    probability: float


def choose(teacher: GameTeacher, match: Match, rng: KeyedRandom, *, greedy: bool = False) -> Move:
    """The teacher's move for the player who is asked; the place in the game alone decides what is drawn.

    Args:
        greedy: take the likeliest move (the first of equal ones) instead of drawing one.
    """
    point = rng.uniform(*match.turn)
    found = teacher.probabilities(match.state, match.player, int(point * (1 << 31)))
    actions = tuple(sorted(found))
    action = (
        max(actions, key=lambda one: found[one])
        if greedy
        else drawn(actions, tuple(found[one] for one in actions), point)
    )
    return Move(action, float(found[action]))


class UniformTeacher:
    """Any legal move, each as likely: what every teacher has to beat."""

    name = "random"

    def probabilities(self, state: Any, player: int, seed: int) -> Mapping[int, float]:
        """The same for each legal action."""
        legal = state.legal_actions(player)
        return dict.fromkeys(legal, 1.0 / len(legal))
