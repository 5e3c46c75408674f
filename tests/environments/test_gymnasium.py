"""Gymnasium's toy text games, with the real package."""

import pytest

from perilune.environments import Transcript, make_environment
from perilune.errors import RequestError
from perilune.verifiers.conformance import check_environment
from perilune.verifiers.scorer import Scorer
from perilune.verifiers.sessions import Sessions


def section(game, **more):
    return {"id": "gymnasium", "game": game, "turns": 12, **more}


@pytest.mark.parametrize("game", ["FrozenLake-v1", "CliffWalking-v1", "Taxi-v4", "Blackjack-v1"])
def test_gymnasium_games_pass_conformance(game):
    assert not check_environment(section(game), tasks=1).findings


def test_frozen_lake_shows_moves_and_rewards_goal():
    environment = make_environment(section("FrozenLake-v1", config={"is_slippery": False}))
    task = next(environment.tasks("train", 0))
    session = environment.reset(task, 0)
    assert session.observation.messages[0]["content"] == "[S]FFF\nFHFH\nFFFH\nHFFG\n"
    moves = (" down\n", "down   ", "down", "right", "right", "down", "right")
    seen = [session.step(move) for move in moves]
    assert seen[0].messages[0]["content"] == seen[1].messages[0]["content"] == "SFFF\n[F]HFH\nFFFH\nHFFG\n"
    assert seen[-1].done and seen[-1].rewards == (1.0,) and seen[-1].metrics["illegal"] == 1.0
    assert environment.score(task, Transcript(moves[-1], earlier=moves[:-1])).reward == 1.0


@pytest.mark.parametrize("game", ["CliffWalking-v1", "Taxi-v4", "Blackjack-v1"])
def test_illegal_moves_earn_less_than_legal_moves(game):
    environment = make_environment(section(game))
    task = next(environment.tasks("train", 0))
    session, played = environment.reset(task, 0), 0.0
    while not session.observation.done:
        played += session.step(session.observation.legal[0]).rewards[0]
    stalled = environment.score(task, Transcript("", earlier=("fly",) * 11))
    assert stalled.reward < played
    assert environment.reset(task, 0).step("up", finished=False).rewards[0] < 0


def test_blackjack_cards_depend_on_seed():
    environment = make_environment(section("Blackjack-v1"))
    task = next(environment.tasks("train", 0))
    texts = [environment.reset(task, seed).observation.messages[0]["content"] for seed in (0, 0, 1, 2, 3)]
    assert texts[0] == texts[1] and len(set(texts)) > 2 and texts[0].startswith("you have ")


def test_gymnasium_rejects_unknown_setting():
    with pytest.raises(RequestError, match=r"environment\.config"):
        make_environment(section("Taxi-v4", config={"wings": 2}))


def test_taxi_shows_taxi_passenger_and_goal_in_their_own_brackets():
    environment = make_environment(section("Taxi-v4"))
    task = next(environment.tasks("train", 0))
    for seed in range(30):
        shown = environment.reset(task, seed).observation.messages[0]["content"]
        assert "\x1b" not in shown and [shown.count(mark) for mark in "[({"] == [1, 1, 1]


@pytest.mark.parametrize("config", [{}, {"is_slippery": True}, {"is_slippery": False}])
def test_prompt_says_whether_ice_is_slippery(config):
    environment = make_environment(section("FrozenLake-v1", config=config))
    (message,) = next(environment.tasks("train", 0)).prompt
    assert ("slippery" in message["content"]) == config.get("is_slippery", True)


def test_cut_off_move_stays_illegal_in_a_new_worker():
    environment = make_environment(section("Taxi-v4"))
    task = next(environment.tasks("train", 0))
    with Scorer(section("Taxi-v4")) as scorer:
        sessions = Sessions(scorer.processes, environment)
        kept, moved = sessions.open([(task, 0)] * 2)
        sessions.step([(kept, ["south"], False), (moved, ["south"], False)])
        moved.generation -= 1  # as if its worker was lost
        sessions.step([(kept, ["north"], True), (moved, ["north"], True)])
        assert kept.result.messages == moved.result.messages
        sessions.close([kept, moved])
