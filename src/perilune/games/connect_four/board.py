"""Connect Four on bitboards, for any number of games at once.

A square is bit `7 * column + row`, with rows counted from below. The seventh bit of each column stays empty,
so that shifts do not carry a line from the top of one column into the next one. A position is two words: the
stones of the player to move, and all stones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLUMNS, ROWS = 7, 6
HEIGHT = ROWS + 1  # bits of a column
DIRECTIONS = (1, HEIGHT - 1, HEIGHT, HEIGHT + 1)  # up, falling, level, rising
PLANES = 6  # see `encode_planes`

Words = NDArray[np.uint64]
Columns = NDArray[np.int64]

BOTTOM_SQUARES = np.array([1 << HEIGHT * column for column in range(COLUMNS)], np.uint64)
COLUMN_SQUARES = BOTTOM_SQUARES * np.uint64((1 << ROWS) - 1)
TOP_SQUARES = BOTTOM_SQUARES << np.uint64(ROWS - 1)
BOARD = np.uint64(COLUMN_SQUARES.sum())
ROWS_BY_PARITY = np.array([BOTTOM_SQUARES.sum() * np.uint64(0b010101 << odd) for odd in (0, 1)], np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Boards:
    """Positions of N games.

    Attributes:
        own: uint64[N], stones of the player to move.
        stones: uint64[N], all stones.
    """

    own: Words
    stones: Words

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, index: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Boards:
        return Boards(self.own[index], self.stones[index])

    @property
    def other(self) -> Words:
        """uint64[N], stones of the player who moved last."""
        return self.own ^ self.stones


def empty_boards(count: int) -> Boards:
    return Boards(np.zeros(count, np.uint64), np.zeros(count, np.uint64))


def concatenate(*parts: Boards) -> Boards:
    return Boards(np.concatenate([p.own for p in parts]), np.concatenate([p.stones for p in parts]))


def from_moves(moves: str) -> Boards:
    """Return one game after moves given as columns "1" to "7", the usual notation.

    Raises:
        ValueError: if a column is full or invalid, or the game is over before the last move.
    """
    boards = empty_boards(1)
    for index, digit in enumerate(moves):
        if has_four(boards.other)[0]:
            raise ValueError(f"the game was over before move {index + 1} of {moves!r}")
        if digit not in "1234567" or not legal_columns(boards)[0, int(digit) - 1]:
            raise ValueError(f"move {index + 1} of {moves!r} is not a column with an empty square")
        boards = play(boards, np.array([int(digit) - 1]))
    return boards


def legal_columns(boards: Boards) -> NDArray[np.bool_]:
    """Return bool[N, 7]: columns with an empty square, whether or not the game is over (`has_four`)."""
    return np.equal(boards.stones[:, None] & TOP_SQUARES, 0)


def play(boards: Boards, columns: Columns) -> Boards:
    """Return the positions after each player to move drops a stone into a legal column."""
    square = (boards.stones + BOTTOM_SQUARES[columns]) & COLUMN_SQUARES[columns]
    return Boards(boards.other, boards.stones | square)


def has_four(stones: Words) -> NDArray[np.bool_]:
    """Return bool[N]: whether four of these stones are in line."""
    lines = np.zeros_like(stones)
    for step in DIRECTIONS:
        pairs = stones & (stones >> np.uint64(step))
        lines |= pairs & (pairs >> np.uint64(2 * step))
    return np.not_equal(lines, 0)


def is_full(boards: Boards) -> NDArray[np.bool_]:
    """Return bool[N]: whether all columns are full."""
    return np.equal(boards.stones, BOARD)


def completing_squares(stones: Words, taken: Words) -> Words:
    """Return empty squares that would complete four in line with these stones, reachable or not."""
    squares = np.zeros_like(stones)
    for step in DIRECTIONS:
        one, two, three = np.uint64(step), np.uint64(2 * step), np.uint64(3 * step)
        below, above = (stones << one) & (stones << two), (stones >> one) & (stones >> two)
        squares |= below & ((stones << three) | (stones >> one))
        squares |= above & ((stones >> three) | (stones << one))
    return squares & BOARD & ~taken


def score_values(scores: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
    """Return float32: the values of games that end with these exact scores (see solver.py).

    A win counts 0.53 to 1, more if it is earlier; a draw 0.
    """
    return np.asarray(np.sign(scores) * (0.5 + np.abs(scores) / 36), np.float32)


def win_values(boards: Boards) -> NDArray[np.float32]:
    """Return float32[N]: the value, for the player who moved last, of games that this move won."""
    return score_values(22 - (count_plies(boards) + 1) // 2)


def count_plies(boards: Boards) -> NDArray[np.int64]:
    """Return int64[N]: stones on each board."""
    bits = np.unpackbits(boards.stones[:, None].view(np.uint8), axis=1)
    return np.asarray(bits.sum(axis=1, dtype=np.int64))


def mirror_words(words: Words) -> Words:
    """Return the boards mirrored left to right."""
    mirrored = np.zeros_like(words)
    for column in range(COLUMNS):
        squares = (words >> np.uint64(HEIGHT * column)) & np.uint64((1 << HEIGHT) - 1)
        mirrored |= squares << np.uint64(HEIGHT * (COLUMNS - 1 - column))
    return mirrored


def select_boards(chosen: NDArray[np.bool_], yes: Boards, no: Boards) -> Boards:
    """Return for each game the position of `yes` or of `no`."""
    return Boards(np.where(chosen, yes.own, no.own), np.where(chosen, yes.stones, no.stones))


def mirror_where(boards: Boards, chosen: NDArray[np.bool_]) -> Boards:
    """Return the positions, mirrored where `chosen`. Mirrored games are equivalent."""
    return select_boards(chosen, Boards(mirror_words(boards.own), mirror_words(boards.stones)), boards)


def encode_planes(boards: Boards) -> NDArray[np.uint8]:
    """Return uint8[N, 6, 7, 7] of zeros and ones by column and row; the seventh row is empty.

    The planes are own stones, the opponent's stones, the empty squares where either player would complete
    four, the squares that can be played now, and every second row. If the player to move began the game,
    these are the first, third and fifth row, otherwise the others. Threats there decide the end of the game
    (Allis, "A knowledge-based approach of Connect-Four", 1988).
    """
    other = boards.other
    words = np.stack(
        [
            boards.own,
            other,
            completing_squares(boards.own, boards.stones),
            completing_squares(other, boards.stones),
            (boards.stones + np.uint64(BOTTOM_SQUARES.sum())) & BOARD,
            ROWS_BY_PARITY[count_plies(boards) % 2],
        ],
        axis=1,
    )
    bits = np.unpackbits(words.view(np.uint8).reshape(len(boards), PLANES, 8), axis=2, bitorder="little")
    return bits[..., : COLUMNS * HEIGHT].reshape(len(boards), PLANES, COLUMNS, HEIGHT)
