"""Small OpenSpiel games, enumerated completely: all decisions, and the exploitability of a policy.

NashConv is the sum over players of the gain from a best response to the others' policies; it is 0 in a Nash
equilibrium. Exploitability is NashConv divided by the number of players (Lanctot et al. 2019,
arXiv:1908.09453).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perilune.environments.core.protocol import Environment, Message
from perilune.environments.core.wrapping import unwrap
from perilune.errors import RequestError
from perilune.games.open_spiel import OpenSpielEnvironment
from perilune.games.open_spiel_match import is_simultaneous, load_pyspiel

MAX_STATES = 20_000  # size limit of a game; Leduc poker has 9,457 states

Policy = Mapping[str, Sequence[float]]
"""For each decision's name, the probabilities of its moves in order."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A player's knowledge when it has to move.

    Attributes:
        name: OpenSpiel's information state.
        messages: the player's conversation so far, including the prompt.
        opening: number of messages before the player's first move.
        moves: the legal moves as text.
        actions: the legal moves as OpenSpiel's action numbers.
    """

    name: str
    player: int
    messages: tuple[Message, ...]
    opening: int
    moves: tuple[str, ...]
    actions: tuple[int, ...]


class ExactGame:
    """All decisions of a small game.

    Attributes:
        decisions: one per information state, in depth-first order.
    """

    def __init__(self, game: Any, decisions: Sequence[Decision]) -> None:
        self.decisions = tuple(decisions)
        self._game = game

    @classmethod
    def from_environment(cls, environment: Environment) -> ExactGame | None:
        """Enumerate an environment's game.

        Returns None if the environment is no OpenSpiel game in self-play, if the game is too large, or if the
        environment has an answer format. With a format, many texts can state the same move, so the
        probability of one text is not the probability of the move.
        """
        played = unwrap(environment)
        if not isinstance(played, OpenSpielEnvironment) or played.spec.opponent != "self":
            return None
        if getattr(environment, "form", None) is not None:
            return None
        game = played.game
        if is_simultaneous(game) or not game.get_type().provides_information_state_string:
            return None
        enumeration = _Enumeration(played, next(environment.tasks("train", 0)).prompt)
        return cls(game, list(enumeration.decisions.values())) if enumeration.is_complete else None

    def nash_conv(self, policy: Policy) -> float:
        """Return the NashConv of a policy that plays all players, in units of the game's returns.

        Raises:
            RequestError: if the policy lacks a decision or has invalid probabilities.
        """
        table = {}
        for decision in self.decisions:
            row = policy.get(decision.name, ())
            if len(row) != len(decision.actions) or abs(sum(row) - 1) > 1e-6 or min(row) < 0:
                raise RequestError(f"no probabilities of {' '.join(decision.moves)}", where=decision.name)
            table[decision.name] = list(zip(decision.actions, map(float, row), strict=True))
        return float(load_pyspiel().nash_conv(self._game, load_pyspiel().TabularPolicy(table)))

    def exploitability(self, policy: Policy) -> float:
        """Return NashConv divided by the number of players."""
        return self.nash_conv(policy) / int(self._game.num_players())


class _Enumeration:
    """Enumerates a game, and gives up if it is too large."""

    def __init__(self, environment: OpenSpielEnvironment, prompt: Sequence[Message]) -> None:
        self.decisions: dict[str, Decision] = {}
        self._environment, self._left = environment, MAX_STATES
        self._opening = len(prompt) + 1
        start = environment.game.new_initial_state()
        self.is_complete = self._visit(start, [tuple(prompt)] * start.num_players())

    def _visit(self, state: Any, conversations: Sequence[tuple[Message, ...]]) -> bool:
        self._left -= 1
        if self._left < 0:
            return False
        if state.is_terminal():
            return True
        if state.is_chance_node():
            return all(self._visit(state.child(action), conversations) for action in state.legal_actions())
        player = state.current_player()
        text, moves = self._environment.describe(state, player)
        messages = (*conversations[player], {"role": "user", "content": text})
        name = state.information_state_string(player)
        decision = Decision(name, player, messages, self._opening, tuple(moves), tuple(moves.values()))
        if self.decisions.setdefault(name, decision) != decision:  # one information state, two descriptions
            return False
        for move, action in moves.items():
            after = self._environment.conversation_after(messages, move)
            following = [*conversations[:player], after, *conversations[player + 1 :]]
            if not self._visit(state.child(action), following):
                return False
        return True
