"""Bitboards agree with a list implementation and with OpenSpiel, move by move."""

import numpy as np
import pyspiel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_game import SlowGame, after

from perilune.games.connect_four import board
from perilune.games.connect_four.self_play import sample_random_columns


def squares(words: np.ndarray) -> set[tuple[int, int]]:
    """Columns and rows of the first word's bits."""
    return {(bit // 7, bit % 7) for bit in range(64) if int(words[0]) >> bit & 1}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=12, max_size=60))
def test_bitboards_agree_with_list_implementation(columns: list[int]) -> None:
    slow, fast = SlowGame(), board.empty_boards(1)
    for column in columns:
        if column not in slow.legal() or board.has_four(fast.other)[0]:
            continue
        slow.play(column)
        fast = board.play(fast, np.array([column]))
        assert (fast.own, fast.stones) == (slow.boards().own, slow.boards().stones)
        assert board.has_four(fast.other)[0] == slow.has_won(1 - slow.moves % 2)
        assert np.flatnonzero(board.legal_columns(fast)[0]).tolist() == slow.legal()
    assert squares(board.completing_squares(fast.own, fast.stones)) == slow.completing(slow.moves % 2)
    assert squares(board.completing_squares(fast.other, fast.stones)) == slow.completing(1 - slow.moves % 2)
    assert board.count_plies(fast)[0] == slow.moves
    seen = board.encode_planes(fast)[0]
    for plane, words in zip(seen, (fast.own, fast.other), strict=False):
        assert {(c, r) for c, r in np.argwhere(plane)} == squares(words)
    stones = squares(fast.stones)
    playable = {(c, sum(column == c for column, _ in stones)) for c in slow.legal()}
    assert {(c, r) for c, r in np.argwhere(seen[4])} == playable
    assert {(c, r) for c, r in np.argwhere(seen[5])} == {
        (c, r) for c in range(7) for r in range(slow.moves % 2, 6, 2)
    }
    assert not seen[:, :, 6].any()


def test_random_games_agree_with_open_spiel() -> None:
    game = pyspiel.load_game("connect_four")
    rng = np.random.default_rng(0)
    boards, states = board.empty_boards(64), [game.new_initial_state() for _ in range(64)]
    for _ in range(42):
        for index, state in enumerate(states):
            assert state.legal_actions() == np.flatnonzero(board.legal_columns(boards)[index]).tolist()
        columns = sample_random_columns(boards, rng.random(len(boards)))
        boards = board.play(boards, columns)
        won, full = board.has_four(boards.other), board.is_full(boards)
        for state, column, is_won, is_full in zip(states, columns, won, full, strict=True):
            mover = state.current_player()
            state.apply_action(int(column))
            assert state.is_terminal() == (is_won or is_full)
            if state.is_terminal():
                assert state.returns()[mover] == (1.0 if is_won else 0.0)
        goes_on = ~(won | full)
        boards = boards[goes_on]
        states = [state for state, on in zip(states, goes_on, strict=True) if on]
        if not states:
            break
    assert not states


def test_mirrored_reverses_columns() -> None:
    moves = [3, 3, 2, 5, 0, 1, 3]
    there, back = after(moves).boards(), after([6 - move for move in moves]).boards()
    assert np.array_equal(board.mirror_words(there.own), back.own)
    assert np.array_equal(board.mirror_words(board.mirror_words(there.stones)), there.stones)
    both = board.mirror_where(board.concatenate(there, there), np.array([True, False]))
    assert both.own.tolist() == [back.own[0], there.own[0]]


@pytest.mark.parametrize("moves", ["8", "1111111", "12121212"])
def test_from_moves_refuses_impossible_moves(moves: str) -> None:
    with pytest.raises(ValueError, match="move"):
        board.from_moves(moves)
