"""Connect Four training: advantages and their signs, determinism, search, and playing strength."""

from pathlib import Path

import numpy as np
import pytest
import torch

from perilune.errors import RequestError
from perilune.games.connect_four.board import (
    Boards,
    concatenate,
    empty_boards,
    from_moves,
    has_four,
    is_full,
    legal_columns,
    play,
    score_values,
)
from perilune.games.connect_four.evaluation import make_openings, play_match, sample_positions
from perilune.games.connect_four.learning import Trainer
from perilune.games.connect_four.learning_settings import LearningSettings
from perilune.games.connect_four.network import Network, evaluate_boards, load_player, save_player
from perilune.games.connect_four.players import (
    NetworkPlayer,
    OpenSpielSearchPlayer,
    SearchPlayer,
    one_ply,
    random_player,
)
from perilune.games.connect_four.search import search
from perilune.games.connect_four.self_play import MoveBatch, SelfPlay, compute_advantages
from perilune.games.connect_four.solver import Solver, find_forced_outcomes

SMALL = LearningSettings(channels=16, hidden=32, games=64, moves=8, minibatch=128)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def stretch(values: list[float], rewards: list[float], over: list[bool]) -> MoveBatch:
    """A stretch of a single game."""
    shape = (len(rewards), 1)
    columns, policies = np.zeros(shape, np.int64), np.zeros((*shape, 7), np.float32)
    of_moves = (np.array(numbers, np.float32)[:, None] for numbers in (values, rewards))
    return MoveBatch(empty_boards(len(rewards)), columns, policies, *of_moves, np.array(over)[:, None])


def test_advantages_negate_the_value_of_the_opponents_turn() -> None:
    """Computed by hand: three moves, of which the last wins, then one move of another game."""
    seen = stretch([0.1, -0.2, 0.5, 0.0, 0.3], [0, 0, 1, 0], [False, False, True, False])
    third = 1 - 0.5
    second = -0.5 - -0.2 - 0.9 * third
    first = 0.2 - 0.1 - 0.9 * second
    fourth = -0.3 - 0.0
    assert compute_advantages(seen, 0.9)[:, 0] == pytest.approx([first, second, third, fourth])


def test_returns_equal_the_outcome_when_lambda_is_one() -> None:
    seen = stretch([0.3, -0.8, 0.1, 0.4], [0, 0, 1], [False, False, True])
    returns = compute_advantages(seen, 1.0)[:, 0] + seen.values[:-1, 0]
    assert returns == pytest.approx([1, -1, 1])


def test_self_play_records_legal_moves_of_unfinished_games() -> None:
    network = Network(8, 16)
    games = SelfPlay(32, seed=3, opening=6, simulations=0)
    first = games.play(network, 0, 20)
    second = games.play(network, 1, 20)
    for seen in (first, second):
        moved = seen.columns.reshape(-1)
        assert legal_columns(seen.boards)[np.arange(len(moved)), moved].all()
        assert not has_four(seen.boards.other).any()
        after = play(seen.boards, moved)
        won = has_four(after.other)
        assert np.array_equal(won, seen.rewards.reshape(-1) > 0)
        assert np.array_equal(won | is_full(after), seen.over.reshape(-1))
        logprobs, values = evaluate_boards(network, seen.boards)
        assert np.exp(logprobs) == pytest.approx(np.exp(seen.policies.reshape(-1, 7)), abs=2e-2)
        assert values == pytest.approx(seen.values[:-1].reshape(-1), abs=2e-2)
    assert first.over.sum() > 10
    assert not np.array_equal(first.columns, second.columns)


def test_trainer_is_deterministic_across_save_and_resume(tmp_path: Path) -> None:
    straight, rested = Trainer(SMALL, 5), Trainer(SMALL, 5)
    figures = [straight.advance(step / 4) for step in range(4)]
    again = [rested.advance(step / 4) for step in range(2)]
    rested.save_state(tmp_path / "half", {"step": 2})
    resumed = Trainer(SMALL, 99)
    resumed._seed = resumed.games._seed = 5
    assert resumed.load_state(tmp_path / "half") == {"step": 2}
    again += [resumed.advance(step / 4) for step in (2, 3)]
    clocks = ("play_seconds", "learn_seconds")
    assert [{k: v for k, v in row.items() if k not in clocks} for row in again] == [
        {k: v for k, v in row.items() if k not in clocks} for row in figures
    ]
    ours, theirs = straight.network.state_dict(), resumed.network.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    other = Trainer(SMALL, 6).advance(0)
    assert other["entropy"] != figures[0]["entropy"]


def test_load_player_round_trips_and_refuses_changed_weights(tmp_path: Path) -> None:
    network = Network(8, 16)
    save_player(tmp_path / "player", network)
    boards = sample_positions(random_player, 12, 20, 0)
    read = load_player(tmp_path / "player")
    assert np.array_equal(evaluate_boards(read, boards)[0], evaluate_boards(network, boards)[0])
    path = tmp_path / "player" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(RequestError, match="differs"):
        load_player(tmp_path / "player")


@pytest.fixture(scope="module")
def learned() -> Trainer:
    """A small network after some seconds of training."""
    torch.set_num_threads(1)
    trainer = Trainer(
        LearningSettings(channels=32, hidden=64, games=256, moves=16, minibatch=512, lr=4e-3), 0
    )
    for step in range(60):
        trainer.advance(step / 60)
    return trainer


@pytest.mark.thorough
def test_short_training_beats_one_ply_search(learned: Trainer) -> None:
    start = make_openings(2, 200, 0)
    player = NetworkPlayer(learned.network)
    assert play_match(player, random_player, start).figures()["points"]["low"] > 0.9
    assert play_match(player, one_ply, start).figures()["points"]["mean"] > 0.5


@pytest.mark.thorough
def test_trained_player_takes_wins_and_blocks_threats(learned: Trainer) -> None:
    boards = sample_positions(random_player, 16, 400, 1)
    at_once, after_reply = find_forced_outcomes(boards, 1), find_forced_outcomes(boards, 2)
    columns = NetworkPlayer(learned.network)(boards, np.zeros(len(boards)))
    picked = np.arange(len(boards)), columns
    wins = (at_once == 1).any(axis=1)
    assert (at_once[picked] == 1)[wins].mean() > 0.85
    blocks = ~wins & (after_reply.max(axis=1) == 0) & (after_reply == -1).any(axis=1)
    assert (after_reply[picked] == 0)[blocks].mean() > 0.65
    assert min(wins.sum(), blocks.sum()) > 50


def test_search_finds_forced_moves_with_an_untrained_network() -> None:
    """An untrained network knows nothing, so only the search can find these moves."""
    network = Network(8, 16)
    wins = from_moves("121212")
    found = search(network, wins, 60)
    assert found.visits.sum() == 60
    assert found.visits[0].argmax() == 0
    assert found.values[0, 0] == 1.0
    must_block = from_moves("12121")
    assert search(network, must_block, 200).visits[0].argmax() == 0
    lost = search(network, from_moves("22334"), 400)
    assert lost.values[0][lost.visits[0] > 5].max() < -0.5
    both = search(network, concatenate(wins, wins, must_block), 60)
    assert np.array_equal(both.visits[0], both.visits[1])


def test_search_solves_positions_near_the_end_of_the_game() -> None:
    """An untrained network guides the search. The solver is another program."""
    boards = sample_positions(random_player, 30, 200, 2)
    exact = Solver().column_scores(boards)
    best = exact.max(axis=1)
    values = search(Network(8, 16), boards, 400).improve(100.0)[1]
    assert np.isclose(values, score_values(best), atol=1e-6).mean() > 0.9
    columns = SearchPlayer(Network(8, 16), 400)(boards, np.zeros(len(boards)))
    assert (exact[np.arange(len(boards)), columns] == best).mean() > 0.95


@pytest.mark.parametrize("simulations", [1, 40])
def test_search_keeps_a_best_move_among_the_candidates(simulations: int) -> None:
    boards = concatenate(*(sample_positions(one_ply, ply, 20, 5) for ply in range(18, 41, 2)))
    exact = Solver().column_scores(boards)
    found = search(Network(8, 16), boards, simulations)
    assert (found.candidates & (exact == exact.max(axis=1, keepdims=True))).any(axis=1).all()
    improved = np.exp(found.improve(5.0)[0])
    assert improved.sum(axis=1) == pytest.approx(1, abs=1e-5)
    assert (improved[~found.candidates] == 0).all()


def test_search_never_chooses_a_full_column() -> None:
    boards = sample_positions(random_player, 30, 60, 4)
    columns = SearchPlayer(Network(8, 16), 20)(boards, np.zeros(len(boards)))
    assert legal_columns(boards)[np.arange(len(boards)), columns].all()


def test_match_plays_every_opening_from_both_sides() -> None:
    start = make_openings(2, 2000, 0)
    even = play_match(one_ply, one_ply, start)
    assert even.began.sum() == 2000
    assert even.figures()["points"]["mean"] == pytest.approx(0.5, abs=0.03)
    figures = play_match(one_ply, random_player, start).figures()
    assert figures["points"]["low"] > 0.85
    assert figures["won"] + figures["drawn"] + figures["lost"] == figures["games"] == 4000
    assert figures["points beginning"]["mean"] > figures["points replying"]["mean"]


def test_tree_search_plays_forced_moves() -> None:
    boards = concatenate(from_moves("121212"), from_moves("12121"), from_moves("1122331"))
    columns = OpenSpielSearchPlayer(200, seed=0)(boards, np.zeros(3))
    assert columns.tolist() == [0, 0, 3]


def test_positions_returns_requested_number_of_unfinished_games() -> None:
    boards = sample_positions(one_ply, 30, 25, 0)
    assert isinstance(boards, Boards)
    assert len(boards) == 25
    assert not has_four(boards.other).any()
