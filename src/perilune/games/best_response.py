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
    environment: OpenSpielEnvironment, seat: int, probabilities: Probabilities, *, least: float = 0.01
) -> Bounds:
    """Return bounds on the mean return of a best response against a policy that plays as player `seat`.

    Args:
        probabilities: called with all positions of one ply at once.
        least: lines below this probability, over the policy's own moves, are left out; 0 searches all.

    Raises:
        RequestError: if the game has hidden information, chance, simultaneous moves, or not two players.
    """
    kind = environment.game.get_type()
    supported = (kind.Information.PERFECT_INFORMATION, kind.ChanceMode.DETERMINISTIC)
    if (kind.information, kind.chance_mode) != supported or environment.game.num_players() != 2:
        what = "a best response needs a two-player game without hidden information or chance"
        raise RequestError(what, where="game")
    if is_simultaneous(environment.game):
        raise RequestError("a best response needs a game without simultaneous moves", where="game")
    prompt = next(environment.tasks("train", 0)).prompt
    root = _Node(environment.game.new_initial_state(), tuple(prompt), 1.0)
    level = [root]
    while level:
        own = [one for one in level if not one.state.is_terminal() and one.state.current_player() == seat]
        decisions = [_decision(environment, seat, one) for one in own]
        answers = probabilities(decisions) if decisions else ()
        for one, decision, answer in zip(own, decisions, answers, strict=True):
            one.probabilities = answer
            _expand(environment, one, decision)
        for one in level:
            if not one.state.is_terminal() and one.state.current_player() != seat:
                one.children = [
                    _Node(one.state.child(action), one.messages, one.reach)
                    for action in one.state.legal_actions()
                ]
        level = [child for one in level for child in one.children if child.reach > least]
    return _value(root, seat, environment.game.max_utility(), least)


def _decision(environment: OpenSpielEnvironment, seat: int, node: _Node) -> Decision:
    text, moves = environment.describe(node.state, seat)
    messages = (*node.messages, {"role": "user", "content": text})
    return Decision(str(node.state), seat, messages, tuple(moves), tuple(moves.values()))


def _expand(environment: OpenSpielEnvironment, node: _Node, decision: Decision) -> None:
    for move, action, p in zip(decision.moves, decision.actions, node.probabilities, strict=True):
        messages = environment.conversation_after(decision.messages, move)
        node.children.append(_Node(node.state.child(action), messages, node.reach * p))


def _value(node: _Node, seat: int, most: float, least: float) -> Bounds:
    if node.state.is_terminal():
        won = float(node.state.returns()[1 - seat])
        return Bounds(won, won)
    if not node.children:
        return Bounds(-most, most)
    values = [_value(child, seat, most, least) for child in node.children]
    if node.state.current_player() != seat:
        return Bounds(max(one.low for one in values), max(one.high for one in values))
    illegal = max(1.0 - sum(node.probabilities), 0.0) * most
    pairs = list(zip(node.probabilities, values, strict=True))
    return Bounds(
        illegal + sum(p * one.low for p, one in pairs), illegal + sum(p * one.high for p, one in pairs)
    )
