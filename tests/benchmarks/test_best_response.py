"""The best response to a policy: OpenSpiel's value, perfect play, bounds, and illegal moves."""

import sys
from pathlib import Path

import pyspiel
import pytest

from perilune.environments import make_environment
from perilune.errors import RequestError

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from best_response import best_response

HEX = make_environment({"id": "open_spiel", "game": "hex", "config": {"board_size": 2}})
NOUGHTS = make_environment({"id": "open_spiel", "game": "tic_tac_toe"})


def uniform(decisions):
    return [[1 / len(decision.moves)] * len(decision.moves) for decision in decisions]


def sometimes_illegal(decisions):
    return [[0.8 / len(decision.moves)] * len(decision.moves) for decision in decisions]


def minimax_value(state, known):
    """The first player's return when both players play perfectly."""
    if state.is_terminal():
        return state.returns()[0]
    key = state.to_string() + str(state.current_player())
    if key not in known:
        values = [minimax_value(state.child(action), known) for action in state.legal_actions()]
        known[key] = max(values) if state.current_player() == 0 else min(values)
    return known[key]


def perfect(decisions, known):
    """The first move that keeps the minimax value of the position."""
    policies = []
    for decision in decisions:
        board = "".join(decision.messages[-1]["content"].splitlines()[1:4])
        state = NOUGHTS.game.new_initial_state()
        crosses, noughts = ([n for n, mark in enumerate(board) if mark == side] for side in "xo")
        for turn in range(len(crosses) + len(noughts)):
            state.apply_action((crosses, noughts)[turn % 2][turn // 2])
        values = [minimax_value(state.child(action), known) for action in decision.actions]
        best = max(values) if state.current_player() == 0 else min(values)
        policies.append([float(move == values.index(best)) for move in range(len(values))])
    return policies


def test_best_responses_sum_to_openspiel_nash_conv():
    exact = [best_response(HEX, seat, uniform, min_reach=0) for seat in (0, 1)]
    assert all(bounds.low == bounds.high for bounds in exact)
    policy = pyspiel.UniformRandomPolicy(HEX.game)
    assert sum(bounds.low for bounds in exact) == pytest.approx(pyspiel.nash_conv(HEX.game, policy))


def test_best_response_gains_nothing_against_perfect_play():
    known = {}
    for seat in (0, 1):
        assert best_response(NOUGHTS, seat, lambda asked: perfect(asked, known)) == (0.0, 0.0)


def test_bounds_contain_the_exact_value_and_tighten():
    exact = best_response(HEX, 1, uniform, min_reach=0).low
    widths = []
    for least in (0.4, 0.1, 0.01):
        bounds = best_response(HEX, 1, uniform, min_reach=least)
        assert bounds.low <= exact <= bounds.high
        widths.append(bounds.high - bounds.low)
    assert widths[0] > widths[-1] == 0


def test_illegal_moves_raise_the_best_response_value():
    least = best_response(HEX, 0, uniform, min_reach=0).low
    assert best_response(HEX, 0, sometimes_illegal, min_reach=0).low > least
    assert best_response(HEX, 0, lambda asked: [[0.0] * len(node.moves) for node in asked]) == (1.0, 1.0)


@pytest.mark.parametrize("game", ["kuhn_poker", "goofspiel"])
def test_games_with_cards_are_refused(game):
    with pytest.raises(RequestError, match="two-player game without"):
        best_response(make_environment({"id": "open_spiel", "game": game}), 0, uniform)
