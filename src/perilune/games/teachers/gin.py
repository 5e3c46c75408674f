"""Gin rummy by rule of thumb: OpenSpiel's simple bot.

It takes the upcard that makes a meld, discards what leaves the least deadwood, and knocks as soon as it may.
That beats chance; it is no equilibrium, and nobody has computed one: the game has about 10^171 histories.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perilune.games.open_spiel_match import pyspiel


class GinRummyTeacher:
    """The rules of thumb; their move is certain."""

    name = "rules"

    def probabilities(self, state: Any, player: int, seed: int) -> Mapping[int, float]:
        """1 for the move of the rules.

        The bot plans which melds it lays down when somebody knocks, and keeps to that: from there on its
        decisions are made again, so that the move follows from what the player has seen.
        """
        spiel = pyspiel()
        game = state.get_game()
        bot = spiel.make_simple_gin_rummy_bot(game.get_parameters(), player)
        history = [int(action) for action in state.history()]
        knock = int(spiel.gin_rummy.KNOCK_ACTION)
        if knock not in history:
            return {int(bot.step(state)): 1.0}
        earlier = game.new_initial_state()
        for place, action in enumerate(history):
            if place >= history.index(knock) and earlier.current_player() == player:
                bot.step(earlier)
            earlier.apply_action(action)
        return {int(bot.step(state)): 1.0}
