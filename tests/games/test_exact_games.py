"""Exact analysis of small games: published values, and the conversations of real sessions."""

import pytest

from perilune.environments import make_environment
from perilune.errors import RequestError
from perilune.games.exact_games import ExactGame


def game(name, **more):
    return ExactGame.from_environment(make_environment({"id": "open_spiel", "game": name, **more}))


def uniform(exact):
    return {decision.name: [1 / len(decision.moves)] * len(decision.moves) for decision in exact.decisions}


def equilibrium(alpha=0.0):
    """Kuhn's equilibrium: (pass, bet) by card and history, for any alpha from 0 to 1/3."""
    bets = {
        "0": alpha, "1": 0.0, "2": 3 * alpha, "0pb": 0.0, "1pb": alpha + 1 / 3, "2pb": 1.0,
        "0p": 1 / 3, "1p": 0.0, "2p": 1.0, "0b": 0.0, "1b": 1 / 3, "2b": 1.0,
    }  # fmt: skip
    return {name: [1 - bet, bet] for name, bet in bets.items()}


def roles_and_contents(messages):
    return tuple((message["role"], message["content"]) for message in messages)


def test_kuhn_poker_has_its_published_nash_conv():
    kuhn = game("kuhn_poker")
    assert len(kuhn.decisions) == 12
    assert kuhn.nash_conv(uniform(kuhn)) == pytest.approx(11 / 12)
    assert kuhn.exploitability(uniform(kuhn)) == pytest.approx(11 / 24)
    for alpha in (0.0, 0.2, 1 / 3):
        assert kuhn.nash_conv(equilibrium(alpha)) == pytest.approx(0, abs=1e-12)
    honest = equilibrium() | {"0p": [1.0, 0.0]}  # never bluffs
    assert kuhn.nash_conv(honest) > 0.01


@pytest.mark.parametrize(
    "prompting",
    [{}, {"system": "Play to win.", "few_shot": [{"question": "Your card?", "answer": "Pass"}]}],
    ids=["plain", "prompted"],
)
def test_decisions_have_the_conversation_of_a_session(prompting):
    environment = make_environment({"id": "open_spiel", "game": "kuhn_poker", "prompting": prompting})
    known = {
        roles_and_contents(node.messages): node for node in ExactGame.from_environment(environment).decisions
    }
    task, seen = next(environment.tasks("train", 0)), set()
    for seed in range(24):
        for moves in (("Pass", "Bet", "Bet"), ("Bet", "Pass"), ("Pass", "Pass")):
            session = environment.reset(task, seed)
            heard = {player: list(task.prompt) for player in (0, 1)}
            for move in moves:
                view = session.observation
                heard[view.player] += view.messages
                decision = known[roles_and_contents(heard[view.player])]
                assert (decision.player, decision.moves) == (view.player, view.legal)
                assert decision.opening == len(task.prompt) + 1
                seen.add(decision.name)
                heard[view.player].append({"role": "assistant", "content": move})
                session.step(move)
    assert len(seen) == 12


def test_exact_game_is_none_for_large_games_or_fixed_opponents():
    assert game("tic_tac_toe") is None
    assert game("goofspiel", config={"num_cards": 4}) is None
    assert game("kuhn_poker", opponent="random") is None
    assert game("kuhn_poker", prompting={"format": "answer_tags"}) is None


@pytest.mark.parametrize("broken", [{"0": [0.7, 0.7]}, {"0": [1.0]}, {"0": [1.5, -0.5]}])
def test_nash_conv_refuses_invalid_probabilities(broken):
    kuhn = game("kuhn_poker")
    with pytest.raises(RequestError, match="no probabilities of Pass Bet"):
        kuhn.nash_conv(uniform(kuhn) | broken)
