"""A plain reference implementation of Connect Four for tests of the fast one.

Columns are lists, lines are checked square by square, and the search has no transposition table.
"""

import numpy as np

from perilune.games.connect_four.board import Boards


class SlowGame:
    """Columns of stones: 0 for the first player, 1 for the second."""

    def __init__(self) -> None:
        self.columns: list[list[int]] = [[] for _ in range(7)]
        self.moves = 0

    def stone(self, column: int, row: int) -> int | None:
        inside = 0 <= column < 7 and 0 <= row < len(self.columns[column])
        return self.columns[column][row] if inside else None

    def legal(self) -> list[int]:
        return [column for column in range(7) if len(self.columns[column]) < 6]

    def play(self, column: int) -> None:
        self.columns[column].append(self.moves % 2)
        self.moves += 1

    def take_back(self, column: int) -> None:
        self.columns[column].pop()
        self.moves -= 1

    def has_won(self, player: int) -> bool:
        return any(
            all(self.stone(column + i * dx, row + i * dy) == player for i in range(4))
            for column in range(7)
            for row in range(6)
            for dx, dy in ((0, 1), (1, 0), (1, 1), (1, -1))
        )

    def completing(self, player: int) -> set[tuple[int, int]]:
        """Empty squares where a stone of the player would complete four in line."""
        found = set()
        for column in range(7):
            for row in range(len(self.columns[column]), 6):
                for dx, dy in ((0, 1), (1, 0), (1, 1), (1, -1)):
                    for start in range(-3, 1):
                        others = [i for i in range(start, start + 4) if i]
                        if all(self.stone(column + i * dx, row + i * dy) == player for i in others):
                            found.add((column, row))
        return found

    def score(self, low: int = -99, high: int = 99) -> int:
        """22 minus the winner's stones at the end, negative for a loss, by exhaustive search."""
        if self.has_won(1 - self.moves % 2):
            return -((44 - self.moves) // 2)
        if self.moves == 42:
            return 0
        best = -99
        for column in self.legal():
            self.play(column)
            best = max(best, -self.score(-high, -max(low, best)))
            self.take_back(column)
            if best >= high:
                break
        return best

    def boards(self) -> Boards:
        stones = [0, 0]
        for column, stack in enumerate(self.columns):
            for row, player in enumerate(stack):
                stones[player] |= 1 << 7 * column + row
        own = stones[self.moves % 2]
        return Boards(np.array([own], np.uint64), np.array([stones[0] | stones[1]], np.uint64))


def after(moves: list[int]) -> SlowGame:
    """The game after these moves. Columns count from 0."""
    game = SlowGame()
    for column in moves:
        game.play(column)
    return game
