"""Exact scores of positions and moves, computed by the C solver in solver.c.

Scores are those of Pascal Pons (blog.gamesolver.org): 22 minus the winner's stones at the end of the game, so
an earlier win has a higher score; negative for a loss, 0 for a draw. The empty board has the score 1.
"""

from ctypes import POINTER, Structure, byref, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perilune.errors import WorkFailedError
from perilune.games.connect_four.board import COLUMNS, Boards
from perilune.models.native.build import load_library

MAX_SCORE, MIN_SCORE = 18, -18  # the first line takes four stones
FULL_COLUMN = -128  # in place of the score of a column that is full

Scores = NDArray[np.int8]

_UNIT = Path(__file__).with_name("solver.c")
_BATCH = (c_void_p, c_void_p, c_int64)


class _Table(Structure):
    """struct table of solver.c."""

    _fields_ = (("entries", c_void_p), ("bits", c_int64), ("nodes", c_int64))


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "scores": (POINTER(_Table), *_BATCH, c_int, c_int, c_void_p),
    "columns": (POINTER(_Table), *_BATCH, c_int, c_int, c_void_p),
    "foreseen": (*_BATCH, c_int, c_void_p),
}


@cache
def load_function(unit: Path, name: str, arguments: tuple[Any, ...]) -> Any:
    """Return the function `perilune_four_NAME` of the C file `unit`.

    Raises:
        WorkFailedError: if there is no C compiler.
    """
    built = load_library(unit)
    if built.library is None:
        raise WorkFailedError(f"{unit} cannot be compiled: {built.reason}", remedy="install a C compiler")
    function = getattr(built.library, f"perilune_four_{name}")
    function.argtypes, function.restype = arguments, None
    return function


def _load_function(name: str) -> Any:
    return load_function(_UNIT, name, _ARGUMENTS[name])


class Solver:
    """Alpha-beta search with a transposition table that is kept between calls.

    Args:
        table_bits: log2 of the number of table entries of 8 bytes.

    Attributes:
        nodes: positions searched so far.

    Raises:
        WorkFailedError: if there is no C compiler.
    """

    def __init__(self, table_bits: int = 22) -> None:
        self._entries = np.zeros(1 << table_bits, np.uint64)
        self._table = _Table(self._entries.ctypes.data, table_bits, 0)
        _load_function("scores")

    @property
    def nodes(self) -> int:
        return int(self._table.nodes)

    def scores(self, boards: Boards, low: int = MIN_SCORE, high: int = MAX_SCORE) -> Scores:
        """Return int8[N]: scores of unfinished games, clipped to [low, high]; -1 and 1 find the winner."""
        return self._solve("scores", boards, low, high, (len(boards),))

    def column_scores(self, boards: Boards, low: int = MIN_SCORE, high: int = MAX_SCORE) -> Scores:
        """Return int8[N, 7]: the score of each column for the player to move; FULL_COLUMN if it is full."""
        return self._solve("columns", boards, low, high, (len(boards), COLUMNS))

    def _solve(self, name: str, boards: Boards, low: int, high: int, shape: tuple[int, ...]) -> Scores:
        scores = np.empty(shape, np.int8)
        own, stones = (np.ascontiguousarray(words) for words in (boards.own, boards.stones))
        _load_function(name)(
            byref(self._table), own.ctypes.data, stones.ctypes.data, len(own), low, high, scores.ctypes.data
        )
        return scores


def find_forced_outcomes(boards: Boards, moves: int) -> Scores:
    """Search all lines of `moves` moves for forced wins and losses.

    Returns int8[N, 7]: 1 for a column that wins, -1 for one that loses, FULL_COLUMN for a full one, else 0.

    Raises:
        WorkFailedError: if there is no C compiler.
    """
    scores = np.empty((len(boards), COLUMNS), np.int8)
    own, stones = (np.ascontiguousarray(words) for words in (boards.own, boards.stones))
    _load_function("foreseen")(own.ctypes.data, stones.ctypes.data, len(own), moves, scores.ctypes.data)
    return scores
