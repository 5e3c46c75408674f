"""Game teachers: their moves, their strength, and the cache of solutions."""

import logging
import math

import numpy as np
import pyspiel
import pytest

from perilune.environments import KeyedRandom
from perilune.errors import RequestError
from perilune.games.open_spiel_match import Match
from perilune.games.teachers import BEST_TEACHERS, choose_move, make_game_teacher
from perilune.games.teachers.regret import RegretSolver, estimate_tree_size
from perilune.games.teachers.table import load_or_solve

SMALL = {
    "goofspiel": {"num_cards": 3},
    "liars_dice": {"dice_sides": 3},
    "hex": {"board_size": 4},
    "clobber": {"rows": 4, "columns": 4},
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path))
    return tmp_path


def load(name, **config):
    return pyspiel.load_game(name, config or SMALL.get(name, {}))


def play(game, teachers, seed):
    """Moves and returns of one game."""
    chance = KeyedRandom(seed, "a game")
    match, moves = Match(game, chance), []
    while not match.is_over:
        moves.append(choose_move(teachers[match.player], match, chance))
        match.take(moves[-1].action)
    return moves, match.returns


def mean_return(game, teachers, games):
    """The mean return of the first teacher, over both seats."""
    return np.mean([
        play(game, teachers if seed % 2 else teachers[::-1], seed)[1][1 - seed % 2] for seed in range(games)
    ])  # fmt: skip


@pytest.mark.parametrize("name", sorted(BEST_TEACHERS))
def test_best_teacher_of_each_game_beats_random_play(name):
    game = load(name)
    teacher, chance = (
        make_game_teacher(kind, game, simulations=30) for kind in (BEST_TEACHERS[name], "random")
    )
    games = {"gin_rummy": 8, "othello": 6}.get(name, 40)
    assert mean_return(game, [teacher, chance], games) > 0
    assert play(game, [teacher, chance], 3) == play(game, [teacher, chance], 3)


@pytest.mark.parametrize(
    ("name", "algorithm", "exploitability"),
    [
        ("kuhn_poker", "cfr", 0.0012),
        ("leduc_poker", "cfr", 0.0134),
    ],
)
def test_cfr_reaches_published_exploitability_after_100_iterations(name, algorithm, exploitability):
    solver = RegretSolver(load(name), algorithm)
    solver.run(100)
    assert solver.exploitability() == pytest.approx(exploitability, abs=5e-5)


def test_mccfr_approaches_equilibrium_and_depends_on_its_seed():
    values = []
    for seed in (1, 1, 2):
        solver = RegretSolver(load("leduc_poker"), "mccfr", seed)
        solver.run(10_000)
        values.append(solver.exploitability())
    assert values[0] == values[1] != values[2]
    assert all(0.2 < value < 0.4 for value in values)


@pytest.mark.parametrize("name", ["kuhn_poker", "goofspiel", "liars_dice"])
def test_policy_table_has_the_exploitability_of_its_solver(name):
    """OpenSpiel computes the same exploitability from the exported table as the solver."""
    solver = RegretSolver(load(name), "mccfr" if name == "liars_dice" else "cfr")
    solver.run(100)
    table = {key: list(row.items()) for key, row in solver.table().items()}
    again = pyspiel.exploitability(solver.game, pyspiel.TabularPolicy(table))
    assert again == pytest.approx(solver.exploitability(), abs=1e-9)


def test_cfr_teacher_mixes_moves_and_reports_probabilities():
    game = load("kuhn_poker")
    teacher = make_game_teacher("cfr", game)
    actions = {}
    for seed in range(300):
        chance = KeyedRandom(seed, "deal")
        match = Match(game, chance)
        knows = match.state.information_state_string(0)
        move = choose_move(teacher, match, chance)
        assert move.probability == teacher.probabilities(match.state, 0, 0)[move.action]
        actions.setdefault(knows, []).append(move.action)
        assert choose_move(teacher, match, chance, greedy=True).probability >= 0.5
    king = actions["2"]
    expected = teacher.table["2"][1]
    assert 0.1 < expected < 0.9 and abs(np.mean(king) - expected) < 4 * math.sqrt(0.25 / len(king))


def test_minimax_never_loses_and_wins_immediately():
    game = load("tic_tac_toe")
    perfect, chance = make_game_teacher("minimax", game), make_game_teacher("random", game)
    returns = [
        play(game, [perfect, chance] if seed % 2 else [chance, perfect], seed)[1] for seed in range(60)
    ]
    assert all(returns[seed][1 - seed % 2] >= 0 for seed in range(60))
    assert play(game, [perfect, perfect], 0)[1] == [0.0, 0.0]
    state = game.new_initial_state()
    for action in (0, 3, 1, 4):
        state.apply_action(action)
    assert perfect.probabilities(state, 0, 0) == {2: 1.0}
    state.apply_action(8)  # x overlooked it
    assert perfect.probabilities(state, 1, 0) == {5: 1.0}


def test_minimax_wins_small_hex_as_first_player():
    game = load("hex", board_size=3)
    perfect, chance = make_game_teacher("minimax", game), make_game_teacher("random", game)
    assert all(play(game, [perfect, chance], seed)[1] == [1.0, -1.0] for seed in range(10))


def test_simultaneous_bids_are_hidden_until_all_players_bid():
    game = load("goofspiel")
    teacher = make_game_teacher("cfr", game)
    chance = KeyedRandom(0, "deal")
    match = Match(game, chance)
    before = teacher.probabilities(match.state, 1, 0)
    match.take(2)
    assert match.player == 1 and teacher.probabilities(match.state, 1, 0) == before
    match.take(0)
    assert match.player == 0 and len(match.state.legal_actions(0)) == 2


def test_solutions_are_cached_and_recomputed_when_damaged(home, caplog):
    table = make_game_teacher("cfr", load("kuhn_poker")).table
    (path,) = (home / "teachers").iterdir()
    kept = path.read_bytes()
    assert make_game_teacher("cfr", load("kuhn_poker")).table == table
    changed = kept.replace(str(table["2"][1]).encode(), b"0.5")
    for damaged in (kept[: len(kept) // 2], b"", kept[:-8] + bytes(8), changed):
        path.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            again = make_game_teacher("cfr", load("kuhn_poker")).table
        assert again == table and "is damaged" in caplog.text and path.read_bytes() == kept
    caplog.clear()
    make_game_teacher("cfr", load("leduc_poker"))
    assert len(list((home / "teachers").iterdir())) == 2 and not caplog.text


def test_cached_table_of_another_request_is_recomputed(home, caplog):
    first, second = {"algorithm": "cfr", "game": "a"}, {"algorithm": "cfr", "game": "b"}
    load_or_solve(first, lambda: {"x": {0: 1.0}})
    (path,) = (home / "teachers").iterdir()
    load_or_solve(second, lambda: {"x": {1: 1.0}})
    (other,) = set((home / "teachers").iterdir()) - {path}
    other.write_bytes(path.read_bytes())
    assert load_or_solve(second, lambda: {"x": {1: 1.0}}) == {"x": {1: 1.0}}
    assert "belongs to another request" in caplog.text


def test_unwritable_home_logs_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path / "file"))
    assert make_game_teacher("cfr", load("kuhn_poker")).table["2"]
    assert "cannot write" in caplog.text


def test_tree_size_is_estimated():
    assert estimate_tree_size(load("kuhn_poker")) == pytest.approx(54, rel=0.6)
    assert estimate_tree_size(pyspiel.load_game("goofspiel")) > 1e12


@pytest.mark.parametrize(
    ("name", "game", "message"),
    [
        ("cfr", pyspiel.load_game("goofspiel"), "num_cards"),
        ("cfr", pyspiel.load_game("leduc_poker", {"players": 3}), "two-player"),
        ("minimax", pyspiel.load_game("clobber"), "mcts"),
        ("minimax", pyspiel.load_game("kuhn_poker"), "one of: clobber"),
        ("rules", pyspiel.load_game("kuhn_poker"), "gin_rummy"),
        ("mcts", pyspiel.load_game("liars_dice"), "use cfr or random"),
        ("best", pyspiel.load_game("kuhn_poker"), "one of: random, mcts"),
    ],
)
def test_make_game_teacher_refuses_unsupported_games(name, game, message, monkeypatch):
    monkeypatch.setattr("perilune.games.teachers.minimax.MAX_POSITIONS", 1000)
    with pytest.raises(RequestError, match=message) as caught:
        make_game_teacher(name, game, where="opponent")
    assert caught.value.where == "opponent"
