"""The exact worth of positions and moves, by the C solver beside this file.

Scores are those of Pascal Pons (blog.gamesolver.org): 22 less the winner's stones when the game ends, so that
an earlier win counts more; negative for a loss, 0 for a draw. The empty board is worth 1.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perilune.errors import WorkFailedError
from perilune.games.connect_four.board import COLUMNS, Boards
from perilune.models.native.build import compiled

BEST, WORST = 18, -18  # the first line takes four stones
NO_COLUMN = -128  # in place of the score of a column that is full

Scores = NDArray[np.int8]

_UNIT = Path(__file__).with_name("solver.c")
_BATCH = (c_void_p, c_void_p, c_int64)


class _Table(Structure):
    """struct table."""

    _fields_ = (("entries", c_void_p), ("bits", c_int64), ("nodes", c_int64))


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "scores": (POINTER(_Table), *_BATCH, c_int, c_int, c_void_p),
    "columns": (POINTER(_Table), *_BATCH, c_int, c_int, c_void_p),
    "foreseen": (*_BATCH, c_int, c_void_p),
}


@cache
def _function(name: str) -> Any:
    found = compiled(_UNIT)
    if found.library is None:
        raise WorkFailedError(
            f"Connect Four cannot be solved here: {found.reason}", remedy="install a C compiler"
        )
    function = getattr(found.library, f"perilune_four_{name}")
    function.argtypes, function.restype = _ARGUMENTS[name], None
    return function


class Solver:
    """Alpha-beta with a table of positions that stays from one question to the next.

    Attributes:
        nodes: positions looked at so far.

    Raises:
        WorkFailedError: where there is no C compiler.
    """

    def __init__(self, table_bits: int = 22) -> None:
        """A table of 2**table_bits entries of 8 bytes."""
        self._entries = np.zeros(1 << table_bits, np.uint64)
        self._table = _Table(self._entries.ctypes.data, table_bits, 0)
        _function("scores")

    @property
    def nodes(self) -> int:
        return int(self._table.nodes)

    def scores(self, boards: Boards, least: int = WORST, most: int = BEST) -> Scores:
        """int8[N] of games that are not over, kept within [least, most]; -1 and 1 ask only who wins."""
        return self._solved("scores", boards, least, most, (len(boards),))

    def column_scores(self, boards: Boards, least: int = WORST, most: int = BEST) -> Scores:
        """int8[N, 7], for whoever is to move: the worth of each column, NO_COLUMN where it is full."""
        return self._solved("columns", boards, least, most, (len(boards), COLUMNS))

    def _solved(self, name: str, boards: Boards, least: int, most: int, shape: tuple[int, ...]) -> Scores:
        found = np.empty(shape, np.int8)
        own, stones = (np.ascontiguousarray(words) for words in (boards.own, boards.stones))
        _function(name)(
            byref(self._table), own.ctypes.data, stones.ctypes.data, len(own), least, most, found.ctypes.data
        )
        return found


def foreseen(boards: Boards, moves: int) -> Scores:
    """int8[N, 7]: 1, 0 or -1 where a column wins, decides nothing or loses within so many moves, itself one.

    NO_COLUMN where it is full; every line of play is looked at.

    Raises:
        WorkFailedError: where there is no C compiler.
    """
    found = np.empty((len(boards), COLUMNS), np.int8)
    own, stones = (np.ascontiguousarray(words) for words in (boards.own, boards.stones))
    _function("foreseen")(own.ctypes.data, stones.ctypes.data, len(own), moves, found.ctypes.data)
    return found
