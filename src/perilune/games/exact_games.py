"""Small games of OpenSpiel looked at whole: all that a player can come to, and how exploitable a policy is.

NashConv is the sum over players of what each could gain by answering the others' policies best; 0 is a Nash
equilibrium. Exploitability is NashConv over the number of players (Lanctot et al. 2019, arXiv:1908.09453).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perilune.environments.core.protocol import Environment, Message
from perilune.errors import RequestError
from perilune.games.open_spiel import OpenSpielEnvironment
from perilune.games.open_spiel_match import is_simultaneous, pyspiel

MOST_STATES = 20_000  # of a game that is looked at whole; Leduc poker has 9,457

Policy = Mapping[str, Sequence[float]]
"""Of each decision, by its name, the probability of each of its moves in order."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a player knows when it has to move.

    Attributes:
        name: OpenSpiel's information state.
        messages: the player's conversation up to here, from the prompt on.
        moves: the legal ones, as the player writes them.
        actions: the same as OpenSpiel counts them.
    """

    name: str
    player: int
    messages: tuple[Message, ...]
    moves: tuple[str, ...]
    actions: tuple[int, ...]


class ExactGame:
    """All decisions of a small game.

    Attributes:
        decisions: one for each information state, in the order in which the game comes to them.
    """

    def __init__(self, game: Any, decisions: Sequence[Decision]) -> None:
        self.decisions = tuple(decisions)
        self._game = game

    @classmethod
    def of(cls, environment: Environment) -> ExactGame | None:
        """The game of an environment; None where it is none of OpenSpiel's, or too large."""
        if not isinstance(environment, OpenSpielEnvironment) or environment.spec.opponent != "self":
            return None
        game = environment.game
        if is_simultaneous(game) or not game.get_type().provides_information_state_string:
            return None
        walk = _Walk(environment)
        return cls(game, list(walk.found.values())) if walk.is_whole else None

    def nash_conv(self, policy: Policy) -> float:
        """NashConv of a policy that has all seats, in units of the game's returns.

        Raises:
            RequestError: when the policy lacks a decision, or what it has there are no probabilities.
        """
        table = {}
        for one in self.decisions:
            chances = policy.get(one.name, ())
            if len(chances) != len(one.actions) or abs(sum(chances) - 1) > 1e-6 or min(chances) < 0:
                raise RequestError(f"no probabilities of {' '.join(one.moves)}", where=one.name)
            table[one.name] = list(zip(one.actions, map(float, chances), strict=True))
        return float(pyspiel().nash_conv(self._game, pyspiel().TabularPolicy(table)))

    def exploitability(self, policy: Policy) -> float:
        """NashConv over the number of players."""
        return self.nash_conv(policy) / int(self._game.num_players())


class _Walk:
    """Goes through all of a game, and gives up when it is too large."""

    def __init__(self, environment: OpenSpielEnvironment) -> None:
        self.found: dict[str, Decision] = {}
        self._environment, self._left = environment, MOST_STATES
        prompt = next(environment.tasks("train", 0)).prompt
        start = environment.game.new_initial_state()
        self.is_whole = self._visit(start, [tuple(prompt)] * start.num_players())

    def _visit(self, state: Any, heard: Sequence[tuple[Message, ...]]) -> bool:
        self._left -= 1
        if self._left < 0:
            return False
        if state.is_terminal():
            return True
        if state.is_chance_node():
            return all(self._visit(state.child(action), heard) for action in state.legal_actions())
        player = state.current_player()
        told, moves = self._environment.told(state, player)
        messages = (*heard[player], {"role": "user", "content": told})
        name = state.information_state_string(player)
        decision = Decision(name, player, messages, tuple(moves), tuple(moves.values()))
        if self.found.setdefault(name, decision) != decision:  # what is told depends on more than is known
            return False
        for move, action in moves.items():
            after = (*messages, {"role": "assistant", "content": move})
            if not self._visit(state.child(action), [*heard[:player], after, *heard[player + 1 :]]):
                return False
        return True
