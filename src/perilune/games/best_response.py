"""What the best reply to a policy wins in a game without hidden cards: bounds, from the policy's own moves.

The reply sees everything, so the game tree is searched: the policy's positions are averaged over its moves,
the reply's are maximised. What the policy does with less than a given probability is not looked at, and
counts as won by the reply for the one bound and as lost for the other. The two meet where little is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from perilune.environments.core.protocol import Message
from perilune.errors import RequestError
from perilune.games.exact_games import Decision
from perilune.games.open_spiel import OpenSpielEnvironment
from perilune.games.open_spiel_match import is_simultaneous

Probabilities = Callable[[Sequence[Decision]], Sequence[Sequence[float]]]
"""Of each decision's moves, in order; what they lack of 1 goes to what is no legal move, which loses."""


class Bounds(NamedTuple):
    """Where a figure lies."""

    low: float
    high: float


@dataclass(slots=True, eq=False)
class _Node:
    """A position, the conversation of the policy that came to it, and with what probability it played so."""

    state: Any
    heard: tuple[Message, ...]
    reach: float
    chances: Sequence[float] = ()
    children: list[_Node] = field(default_factory=list)


def best_response(
    environment: OpenSpielEnvironment, seat: int, probabilities: Probabilities, *, least: float = 0.01
) -> Bounds:
    """Bounds of what the best reply earns, on average, from a policy in `seat`, in the game's returns.

    Args:
        probabilities: asked for all positions of a ply at once.
        least: probability of the policy's own moves so far below which a line is left out; 0 looks at all.

    Raises:
        RequestError: when the game has hidden cards, dice, more than two players, or moves at the same time.
    """
    kind = environment.game.get_type()
    seen = (kind.Information.PERFECT_INFORMATION, kind.ChanceMode.DETERMINISTIC)
    if (kind.information, kind.chance_mode) != seen or environment.game.num_players() != 2:
        raise RequestError("the best reply is searched in games of two without cards or dice", where="game")
    if is_simultaneous(environment.game):
        raise RequestError("the best reply is searched where players move one after another", where="game")
    prompt = next(environment.tasks("train", 0)).prompt
    root = _Node(environment.game.new_initial_state(), tuple(prompt), 1.0)
    level = [root]
    while level:
        own = [one for one in level if not one.state.is_terminal() and one.state.current_player() == seat]
        asked = [_decision(environment, seat, one) for one in own]
        for one, decision, chances in zip(own, asked, probabilities(asked) if asked else (), strict=True):
            one.chances = chances
            _grow(one, decision)
        for one in level:
            if not one.state.is_terminal() and one.state.current_player() != seat:
                one.children = [
                    _Node(one.state.child(action), one.heard, one.reach)
                    for action in one.state.legal_actions()
                ]
        level = [child for one in level for child in one.children if child.reach > least]
    return _value(root, seat, environment.game.max_utility(), least)


def _decision(environment: OpenSpielEnvironment, seat: int, node: _Node) -> Decision:
    told, moves = environment.told(node.state, seat)
    heard = (*node.heard, {"role": "user", "content": told})
    return Decision(str(node.state), seat, heard, tuple(moves), tuple(moves.values()))


def _grow(node: _Node, decision: Decision) -> None:
    for move, action, chance in zip(decision.moves, decision.actions, node.chances, strict=True):
        heard = (*decision.messages, {"role": "assistant", "content": move})
        node.children.append(_Node(node.state.child(action), heard, node.reach * chance))


def _value(node: _Node, seat: int, most: float, least: float) -> Bounds:
    if node.state.is_terminal():
        won = float(node.state.returns()[1 - seat])
        return Bounds(won, won)
    if not node.children:
        return Bounds(-most, most)
    found = [_value(child, seat, most, least) for child in node.children]
    if node.state.current_player() != seat:
        return Bounds(max(one.low for one in found), max(one.high for one in found))
    illegal = max(1.0 - sum(node.chances), 0.0) * most
    pairs = list(zip(node.chances, found, strict=True))
    return Bounds(
        illegal + sum(p * one.low for p, one in pairs), illegal + sum(p * one.high for p, one in pairs)
    )
