"""TextArena games that need no network, with the real package."""

import random
import re
from importlib import import_module
from itertools import islice

import numpy as np
import pytest

from perilune.environments import KeyedRandom, Transcript, make_environment
from perilune.environments.adapters.textarena import TextArenaEnvironment
from perilune.errors import RequestError
from perilune.verifiers.conformance import check_environment

GAMES = ("TicTacToe-v0", "KuhnPoker-v0", "ThreePlayerTicTacToe-v0", "Mastermind-v0")
MORE = (
    "Nim-v0",
    "Sokoban-v0",
    "GuessTheNumber-v0",
    "2048-v0-3x3",
    "LiarsDice-v0",
    "Poker-v0",
    "SecretMafia-v0",
)


def section(game, **more):
    return {"id": "textarena", "game": game, **more}


def play(environment, moves, task=None, seed=0):
    session = environment.reset(task or next(environment.tasks("train", 0)), seed)
    seen = [session.observation]
    for move in moves:
        seen.append(session.step(move))
    session.close()
    return seen


def play_to_end(environment, texts, seed):
    session = environment.reset(next(environment.tasks("train", 0)), seed)
    seen = [session.observation]
    while not session.observation.done:
        seen.append(session.step(texts[len(seen) - 1]))
    return seen


@pytest.mark.parametrize(
    "game", [GAMES[0], *(pytest.param(other, marks=pytest.mark.thorough) for other in GAMES[1:])]
)
def test_textarena_games_pass_conformance(game):
    assert not check_environment(section(game, turns=20), tasks=1).findings


@pytest.mark.parametrize("game", MORE)
def test_same_seed_gives_same_game(game):
    environment = make_environment(section(game, turns=30))
    texts = [
        KeyedRandom(0, game).choice(("[1]", "[0]", "[up]", "[1 2]", "hello"), turn) for turn in range(30)
    ]
    first, same, other = (play_to_end(environment, texts, seed) for seed in (3, 3, 4))
    assert first == same and (first != other or game == "Nim-v0")  # Nim has no random numbers
    assert first[-1].done and len(first[-1].rewards) in (0, environment.players)


def test_each_player_of_tic_tac_toe_gets_own_messages_and_reward():
    environment = make_environment(section("TicTacToe-v0"))
    assert environment.players == 2
    task = next(environment.tasks("train", 0))
    moves = ("[0]", "[3]", "[1]", "[4]", "[2]")
    seen = play(environment, moves, task)
    assert [observation.player for observation in seen[:-1]] == [0, 1, 0, 1, 0]
    first, second, third = (observation.messages[0]["content"] for observation in seen[:3])
    assert first.startswith("You are Player 0") and second.startswith("You are Player 1")
    assert "[Player 0] [0]\n" in second and "[Player 1] [3]\n" in third and "[0]\n" not in third
    assert seen[-1].done and seen[-1].rewards == (1.0, -1.0) and seen[-1].metrics == {"illegal": 0.0}
    for player, reward in ((0, 1.0), (1, -1.0)):
        transcript = Transcript(moves[-1], earlier=moves[:-1], player=player)
        assert environment.score(task, transcript).reward == reward


def test_repeated_invalid_move_loses_game():
    environment = make_environment(section("TicTacToe-v0"))
    _, again, end = play(environment, ("hello", "[9]"))
    assert again.player == 0 and "attempted an invalid move" in again.messages[0]["content"]
    assert end.rewards == (-1.0, 1.0) and end.metrics["illegal"] == 1.0


def test_cards_depend_only_on_seed():
    environment = make_environment(section("KuhnPoker-v0", config={"max_rounds": 3}))
    task = next(environment.tasks("train", 0))
    before = random.getstate(), np.random.get_state()[1].tolist()
    moves = ("[check]", "[check]") * 2
    game = play(environment, moves, task, seed=4)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())
    session, other = environment.reset(task, 4), environment.reset(task, 5)
    for move, expected in zip(moves, game[1:], strict=True):  # play another game between the moves
        random.random()
        other.step(move)
        assert session.step(move) == expected
    dealt = {play(environment, (), task, seed)[0].messages[0]["content"][-60:] for seed in range(8)}
    assert len(dealt) > 2


def test_game_is_truncated_at_turn_limit():
    environment = make_environment(section("GuessTheNumber-v0", turns=2))
    seen = play(environment, ("[1]", "[2]"))
    assert seen[-1].truncated and seen[-1].done


def test_players_setting_sets_number_of_players():
    assert make_environment(section("LiarsDice-v0", players=4)).players == 4
    assert make_environment(section("MarketEntryGame-v0")).players > 1
    tasks = make_environment(section("Nim-v0")).tasks
    assert len({task.task_id for split in ("train", "heldout") for task in islice(tasks(split, 0), 30)}) == 60


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (section("TicTacTo-v0"), "environment.game"),
        (section("TicTacToe-v0", players=3), "environment.players"),
        (section("TicTacToe-v0", config={"size": 4}), "environment.config"),
        (section("Debate-v0"), "environment.game"),  # uses a model as a judge
    ],
)
def test_invalid_game_settings_are_rejected(wrong, where, monkeypatch):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(RequestError) as caught:
        make_environment(wrong)
    assert caught.value.where == where


def test_families_are_registered_games_without_variants():
    registered = import_module("textarena.envs.registration").ENV_REGISTRY
    default = {name for name in registered if re.fullmatch(r".*-v\d+", name)}
    assert TextArenaEnvironment.families() == tuple(sorted(default))


def test_missing_package_names_extra_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "textarena.envs.registration", None)
    with pytest.raises(RequestError) as caught:
        make_environment(section("TicTacToe-v0"))
    assert "perilune[textarena-gpl]" in caught.value.remedy and "GPL" in caught.value.remedy
