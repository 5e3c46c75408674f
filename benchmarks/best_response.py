"""Bounds on what a best response wins against a policy, in games with perfect information.

The game tree is searched: positions of the policy are averaged over its moves, and positions of the best
response are maximized. Lines that the policy plays with less than a given probability are left out. They
count as won by the best response for the upper bound and as lost for the lower one.
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
"""The probabilities of each decision's moves, in order. The rest to 1 is for illegal moves, which lose."""


class Bounds(NamedTuple):
    """Lower and upper bound of a number."""

    low: float
    high: float


@dataclass(slots=True, eq=False)
class _Node:
    """A position, the policy's conversation so far, and the probability that the policy's moves lead here."""

    state: Any
    messages: tuple[Message, ...]
    reach: float
    probabilities: Sequence[float] = ()
    children: list[_Node] = field(default_factory=list)


def best_response(
    environment: OpenSpielEnvironment,
    seat: int,
    probabilities: Probabilities,
    *,
    min_reach: float = 0.01,
) -> Bounds:
    """Return bounds on the mean return of a best response against a policy that plays as player `seat`.

    Args:
        probabilities: called with all positions of one ply at once.
        min_reach: lines that the policy plays with a lower probability are left out; 0: none.

    Raises:
        RequestError: if the game has hidden information, chance, simultaneous moves, or not two players.
    """
    game_type = environment.game.get_type()
    supported = (game_type.Information.PERFECT_INFORMATION, game_type.ChanceMode.DETERMINISTIC)
    if (game_type.information, game_type.chance_mode) != supported or environment.game.num_players() != 2:
        what = "a best response needs a two-player game without hidden information or chance"
        raise RequestError(what, where="game")
    if is_simultaneous(environment.game):
        raise RequestError("a best response needs a game without simultaneous moves", where="game")
    prompt = next(environment.tasks("train", 0)).prompt
    root = _Node(environment.game.new_initial_state(), tuple(prompt), 1.0)
    level = [root]
    while level:
        own = [node for node in level if not node.state.is_terminal() and node.state.current_player() == seat]
        decisions = [_make_decision(environment, seat, node) for node in own]
        answers = probabilities(decisions) if decisions else ()
        for node, decision, answer in zip(own, decisions, answers, strict=True):
            node.probabilities = answer
            _expand(environment, node, decision)
        for node in level:
            if not node.state.is_terminal() and node.state.current_player() != seat:
                node.children = [
                    _Node(node.state.child(action), node.messages, node.reach)
                    for action in node.state.legal_actions()
                ]
        level = [child for node in level for child in node.children if child.reach > min_reach]
    return _bound_value(root, seat, environment.game.max_utility())


def _make_decision(environment: OpenSpielEnvironment, seat: int, node: _Node) -> Decision:
    text, moves = environment.describe(node.state, seat)
    messages = (*node.messages, {"role": "user", "content": text})
    return Decision(str(node.state), seat, messages, len(messages), tuple(moves), tuple(moves.values()))


def _expand(environment: OpenSpielEnvironment, node: _Node, decision: Decision) -> None:
    for move, action, p in zip(decision.moves, decision.actions, node.probabilities, strict=True):
        messages = environment.conversation_after(decision.messages, move)
        node.children.append(_Node(node.state.child(action), messages, node.reach * p))


def _bound_value(node: _Node, seat: int, max_return: float) -> Bounds:
    if node.state.is_terminal():
        won = float(node.state.returns()[1 - seat])
        return Bounds(won, won)
    if not node.children:
        return Bounds(-max_return, max_return)
    values = [_bound_value(child, seat, max_return) for child in node.children]
    if node.state.current_player() != seat:
        return Bounds(max(bounds.low for bounds in values), max(bounds.high for bounds in values))
    illegal = max(1.0 - sum(node.probabilities), 0.0) * max_return
    pairs = list(zip(node.probabilities, values, strict=True))
    return Bounds(
        illegal + sum(p * bounds.low for p, bounds in pairs),
        illegal + sum(p * bounds.high for p, bounds in pairs),
    )
