"""The solver's scores match an exhaustive search and known positions."""

from pathlib import Path

import numpy as np
import pytest
from slow_game import SlowGame

from perilune.errors import WorkFailedError
from perilune.games.connect_four import solver as solver_module
from perilune.games.connect_four.board import Boards, concatenate, from_moves, mirror_words
from perilune.games.connect_four.evaluation import sample_positions
from perilune.games.connect_four.players import one_ply, random_player
from perilune.games.connect_four.solver import FULL_COLUMN, Solver, find_forced_outcomes
from perilune.models.native import build


@pytest.fixture(scope="module")
def solver() -> Solver:
    return Solver(20)


def as_slow_game(boards: Boards) -> SlowGame:
    """The same position as lists. Player numbers follow from the side to move."""
    game = SlowGame()
    own, stones = int(boards.own[0]), int(boards.stones[0])
    game.moves = stones.bit_count()
    me = game.moves % 2
    for column in range(7):
        for row in range(6):
            bit = 1 << 7 * column + row
            if stones & bit:
                game.columns[column].append(me if own & bit else 1 - me)
    return game


def test_late_positions_score_as_in_exhaustive_search(solver: Solver) -> None:
    boards = concatenate(
        *(sample_positions(who, ply, 6, 0) for who in (random_player, one_ply) for ply in (33, 35, 37))
    )
    scores, columns = solver.scores(boards), solver.column_scores(boards)
    for index in range(len(boards)):
        game = as_slow_game(boards[index : index + 1])
        assert scores[index] == game.score()
        for column in range(7):
            if column not in game.legal():
                assert columns[index, column] == FULL_COLUMN
                continue
            game.play(column)
            assert columns[index, column] == -game.score()
            game.take_back(column)
    assert len(set(scores.tolist())) > 5


def test_scores_are_clipped_to_the_window(solver: Solver) -> None:
    boards = sample_positions(random_player, 20, 50, 1)
    exact = solver.scores(boards)
    assert np.array_equal(solver.scores(boards, -1, 1), np.sign(exact))
    assert np.array_equal(solver.scores(boards, -3, 2), exact.clip(-3, 2))
    assert np.array_equal(Solver(12).scores(boards), exact)  # a small table evicts entries and stays exact
    assert exact.min() < -3 and exact.max() > 2


def test_score_counts_the_winners_remaining_stones(solver: Solver) -> None:
    assert solver.scores(from_moves("121212"))[0] == 18  # wins with its fourth stone
    assert solver.scores(from_moves("22334"))[0] == -18  # three in a row, open at both ends
    columns = solver.column_scores(from_moves("121212"), 17, 18)[0]
    assert columns.tolist() == [18, 17, 17, 17, 17, 17, 17]


def test_mirrored_positions_have_equal_scores(solver: Solver) -> None:
    boards = sample_positions(random_player, 16, 20, 2)
    other = Boards(mirror_words(boards.own), mirror_words(boards.stones))
    assert np.array_equal(solver.scores(boards), Solver(18).scores(other))
    assert np.array_equal(solver.column_scores(boards), solver.column_scores(other)[:, ::-1])


def test_foreseen_agrees_with_the_solver(solver: Solver) -> None:
    boards = sample_positions(one_ply, 36, 60, 3)
    exact = solver.column_scores(boards)
    room = exact != FULL_COLUMN
    assert np.array_equal(find_forced_outcomes(boards, 6)[room], np.sign(exact)[room])  # six squares are left
    assert (find_forced_outcomes(boards, 6)[~room] == FULL_COLUMN).all()
    at_once = find_forced_outcomes(boards, 1)
    assert np.array_equal(at_once[room] == 1, (exact == 3)[room])
    assert set(np.unique(at_once[room])) == {0, 1}


def test_solver_without_a_compiler_reports_the_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(solver_module, "load_library", lambda unit: build.Native(None, "no C compiler found"))
    solver_module.load_function.cache_clear()
    try:
        with pytest.raises(WorkFailedError, match="no C compiler"):
            Solver(10)
    finally:
        solver_module.load_function.cache_clear()
