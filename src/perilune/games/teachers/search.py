"""Tree search with random rollouts (UCT; Kocsis and Szepesvari 2006), by OpenSpiel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perilune.games.open_spiel_match import pyspiel

UCT = 2.0  # exploration
MEMORY_MB = 16  # of one search


class SearchTeacher:
    """The most promising move of a search that begins anew at every turn.

    So its move follows from the position and the seed alone; and given those it is certain.

    Args:
        simulations: of a move, each with one rollout.
    """

    name = "mcts"

    def __init__(self, simulations: int) -> None:
        self._simulations = simulations

    def probabilities(self, state: Any, player: int, seed: int) -> Mapping[int, float]:
        """1 for the move that it chooses."""
        spiel = pyspiel()
        rollouts = spiel.RandomRolloutEvaluator(1, seed)
        bot = spiel.MCTSBot(state.get_game(), rollouts, UCT, self._simulations, MEMORY_MB, True, seed, False)
        return {int(bot.step(state)): 1.0}
