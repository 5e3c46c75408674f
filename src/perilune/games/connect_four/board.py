"""Connect Four on bitboards, any number of games at once.

A square is the bit `7 * column + row`, rows counted from below; the seventh bit of each column stays empty,
so that shifts never carry a line from one column's top into the next one's bottom. A position is two words:
the stones of whoever is to move, and all stones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

COLUMNS, ROWS = 7, 6
SQUARES = COLUMNS * ROWS
HEIGHT = ROWS + 1  # bits of a column
DIRECTIONS = (1, HEIGHT - 1, HEIGHT, HEIGHT + 1)  # up, falling, level, rising
PLANES = 4  # of `planes`

Words = NDArray[np.uint64]
Columns = NDArray[np.int64]

BOTTOM_SQUARES = np.array([1 << HEIGHT * column for column in range(COLUMNS)], np.uint64)
COLUMN_SQUARES = BOTTOM_SQUARES * np.uint64((1 << ROWS) - 1)
TOP_SQUARES = BOTTOM_SQUARES << np.uint64(ROWS - 1)
BOARD = np.uint64(COLUMN_SQUARES.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Boards:
    """Positions of N games.

    Attributes:
        own: uint64[N], stones of whoever is to move.
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
        """Stones of whoever moved last."""
        return self.own ^ self.stones


def empty(count: int) -> Boards:
    """Games that have not begun."""
    return Boards(np.zeros(count, np.uint64), np.zeros(count, np.uint64))


def joined(*parts: Boards) -> Boards:
    """All games of several."""
    return Boards(np.concatenate([p.own for p in parts]), np.concatenate([p.stones for p in parts]))


def from_moves(moves: str) -> Boards:
    """One game after columns "1" to "7", as Connect Four players write it.

    Raises:
        ValueError: when a column is full or none of them, or the game is over before the last move.
    """
    boards = empty(1)
    for index, digit in enumerate(moves):
        if has_four(boards.other)[0]:
            raise ValueError(f"the game was over before move {index + 1} of {moves!r}")
        if digit not in "1234567" or not legal(boards)[0, int(digit) - 1]:
            raise ValueError(f"move {index + 1} of {moves!r} is not a column with room")
        boards = play(boards, np.array([int(digit) - 1]))
    return boards


def legal(boards: Boards) -> NDArray[np.bool_]:
    """bool[N, 7]: columns that have room, though the game may be over (`has_four`)."""
    return np.equal(boards.stones[:, None] & TOP_SQUARES, 0)


def play(boards: Boards, columns: Columns) -> Boards:
    """The positions after each drops a stone into a column that has room."""
    square = (boards.stones + BOTTOM_SQUARES[columns]) & COLUMN_SQUARES[columns]
    return Boards(boards.other, boards.stones | square)


def has_four(stones: Words) -> NDArray[np.bool_]:
    """Whether four of these stones are in line."""
    found = np.zeros_like(stones)
    for step in DIRECTIONS:
        pairs = stones & (stones >> np.uint64(step))
        found |= pairs & (pairs >> np.uint64(2 * step))
    return np.not_equal(found, 0)


def is_full(boards: Boards) -> NDArray[np.bool_]:
    """Whether no column has room."""
    return np.equal(boards.stones, BOARD)


def completing(stones: Words, taken: Words) -> Words:
    """Squares that are not taken and would make four in line with these stones, within reach or not."""
    found = np.zeros_like(stones)
    for step in DIRECTIONS:
        one, two, three = np.uint64(step), np.uint64(2 * step), np.uint64(3 * step)
        below, above = (stones << one) & (stones << two), (stones >> one) & (stones >> two)
        found |= below & ((stones << three) | (stones >> one))
        found |= above & ((stones >> three) | (stones << one))
    return found & BOARD & ~taken


def plies(boards: Boards) -> NDArray[np.int64]:
    """int64[N]: stones on each board."""
    bits = np.unpackbits(boards.stones[:, None].view(np.uint8), axis=1)
    return np.asarray(bits.sum(axis=1, dtype=np.int64))


def mirrored(words: Words) -> Words:
    """The squares seen in a mirror: columns from right to left."""
    found = np.zeros_like(words)
    for column in range(COLUMNS):
        squares = (words >> np.uint64(HEIGHT * column)) & np.uint64((1 << HEIGHT) - 1)
        found |= squares << np.uint64(HEIGHT * (COLUMNS - 1 - column))
    return found


def where(chosen: NDArray[np.bool_], yes: Boards, no: Boards) -> Boards:
    """Of each game the one position or the other."""
    return Boards(np.where(chosen, yes.own, no.own), np.where(chosen, yes.stones, no.stones))


def mirrored_where(boards: Boards, chosen: NDArray[np.bool_]) -> Boards:
    """The positions, mirrored where it is asked for: the game is the same."""
    return where(chosen, Boards(mirrored(boards.own), mirrored(boards.stones)), boards)


def planes(boards: Boards) -> NDArray[np.uint8]:
    """uint8[N, 4, 7, 7] of zeros and ones by column and row, the seventh row of which is empty.

    Own stones, the other's, and the empty squares where either would complete four.
    """
    other = boards.other
    words = np.stack(
        [boards.own, other, completing(boards.own, boards.stones), completing(other, boards.stones)], axis=1
    )
    bits = np.unpackbits(words.view(np.uint8).reshape(len(boards), PLANES, 8), axis=2, bitorder="little")
    return bits[..., : COLUMNS * HEIGHT].reshape(len(boards), PLANES, COLUMNS, HEIGHT)
