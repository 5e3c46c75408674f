"""Monte Carlo tree search guided by a network, over many games at once.

Each game has its own tree. Every simulation descends all trees together, so the network evaluates one
position per game at a time. The search uses PUCT (Silver et al., "A general reinforcement learning algorithm
that masters chess, shogi and Go through self-play", Science 2018). Ends of games are exact.
"""

from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perilune.errors import WorkFailedError
from perilune.games.connect_four.board import COLUMNS, Boards
from perilune.games.connect_four.network import Network, evaluate_boards
from perilune.models.native.build import load_library

EXPLORATION = 1.5

_UNIT = Path(__file__).with_name("search.c")
_FIELDS = "own stones children visits priors totals parents columns worth over leaves"
_POINTERS = tuple(_FIELDS.split())
_PER_TREE = {"leaves": np.int32}
_PER_NODE = {
    "own": np.uint64,
    "stones": np.uint64,
    "parents": np.int32,
    "columns": np.int8,
    "worth": np.float32,
    "over": np.uint8,
}
_PER_COLUMN = {"children": np.int32, "visits": np.int32, "priors": np.float32, "totals": np.float32}


@dataclass(frozen=True, slots=True, eq=False)
class SearchResult:
    """The result of searching N positions.

    Attributes:
        visits: int32[N, 7], simulations that began with each column.
        values: float32[N, 7], their mean outcome for the player to move; 0 if there were none.
    """

    visits: NDArray[np.int32]
    values: NDArray[np.float32]

    @property
    def mean_value(self) -> NDArray[np.float32]:
        """float32[N]: the mean outcome of all simulations."""
        mean = (self.visits * self.values).sum(axis=1) / self.visits.sum(axis=1)
        return np.asarray(mean, np.float32)


class _Forest(Structure):
    """struct forest of search.c."""

    _fields_ = (*((name, c_void_p) for name in _POINTERS), ("trees", c_int64), ("nodes", c_int64))


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "descend": (POINTER(_Forest), c_int64, c_float),
    "absorb": (POINTER(_Forest), c_int64, c_void_p, c_void_p),
}


@cache
def _load_function(name: str) -> Any:
    unit = load_library(_UNIT)
    if unit.library is None:
        raise WorkFailedError(f"the search cannot be compiled: {unit.reason}", remedy="install a C compiler")
    function = getattr(unit.library, f"perilune_four_{name}")
    function.argtypes, function.restype = _ARGUMENTS[name], None
    return function


def search(network: Network, boards: Boards, simulations: int) -> SearchResult:
    """Search positions of unfinished games.

    Raises:
        WorkFailedError: if there is no C compiler.
    """
    trees, nodes = len(boards), simulations + 1
    arrays: dict[str, NDArray[Any]] = {name: np.zeros(trees, kind) for name, kind in _PER_TREE.items()}
    arrays |= {name: np.zeros((trees, nodes), kind) for name, kind in _PER_NODE.items()}
    arrays |= {name: np.zeros((trees, nodes, COLUMNS), kind) for name, kind in _PER_COLUMN.items()}
    pointers = {name: array.ctypes.data for name, array in arrays.items()}
    forest = _Forest(trees=trees, nodes=nodes, **pointers)
    arrays["own"][:, 0], arrays["stones"][:, 0] = boards.own, boards.stones
    for node in range(nodes):
        if node:
            _load_function("descend")(byref(forest), node, EXPLORATION)
        leaves = np.arange(trees), arrays["leaves"]
        logprobs, values = evaluate_boards(network, Boards(arrays["own"][leaves], arrays["stones"][leaves]))
        priors = np.exp(logprobs)
        _load_function("absorb")(byref(forest), node, priors.ctypes.data, values.ctypes.data)
    visits, totals = arrays["visits"][:, 0], arrays["totals"][:, 0]
    return SearchResult(visits, np.divide(totals, np.maximum(visits, 1), dtype=np.float32))
