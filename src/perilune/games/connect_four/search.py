"""Monte Carlo tree search led by a network, over many games at once.

Each game has a tree of its own; every simulation goes down all trees together, so that the network sees one
position of each at a time. PUCT of Silver et al., "A general reinforcement learning algorithm that masters
chess, shogi and Go through self-play" (Science 2018). Ends of games that the search meets are exact.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perilune.errors import WorkFailedError
from perilune.games.connect_four.board import COLUMNS, Boards
from perilune.games.connect_four.network import Network, evaluate
from perilune.models.native.build import compiled

EXPLORATION = 1.5

_UNIT = Path(__file__).with_name("search.c")
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
class Found:
    """What a search of N positions came to.

    Attributes:
        visits: int32[N, 7], simulations that began with each column.
        values: float32[N, 7], their mean outcome for whoever is to move; 0 where there was none.
    """

    visits: NDArray[np.int32]
    values: NDArray[np.float32]

    @property
    def worth(self) -> NDArray[np.float32]:
        """float32[N]: the mean outcome of all simulations."""
        found = (self.visits * self.values).sum(axis=1) / self.visits.sum(axis=1)
        return np.asarray(found, np.float32)


class _Forest(Structure):
    """struct forest."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in (
                "own", "stones", "children", "visits", "priors", "totals", "parents", "columns", "worth",
                "over", "leaves",
            )
        ),
        ("trees", c_int64),
        ("nodes", c_int64),
    )  # fmt: skip


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "descend": (POINTER(_Forest), c_int64, c_float),
    "absorb": (POINTER(_Forest), c_int64, c_void_p, c_void_p),
}


@cache
def _function(name: str) -> Any:
    found = compiled(_UNIT)
    if found.library is None:
        raise WorkFailedError(f"there is no search here: {found.reason}", remedy="install a C compiler")
    function = getattr(found.library, f"perilune_four_{name}")
    function.argtypes, function.restype = _ARGUMENTS[name], None
    return function


def search(network: Network, boards: Boards, simulations: int) -> Found:
    """Look ahead from positions of games that are not over.

    Raises:
        WorkFailedError: where there is no C compiler.
    """
    trees, nodes = len(boards), simulations + 1
    held: dict[str, NDArray[Any]] = {name: np.zeros(trees, kind) for name, kind in _PER_TREE.items()}
    held |= {name: np.zeros((trees, nodes), kind) for name, kind in _PER_NODE.items()}
    held |= {name: np.zeros((trees, nodes, COLUMNS), kind) for name, kind in _PER_COLUMN.items()}
    forest = _Forest(trees=trees, nodes=nodes, **{name: array.ctypes.data for name, array in held.items()})
    held["own"][:, 0], held["stones"][:, 0] = boards.own, boards.stones
    for fresh in range(nodes):
        if fresh:
            _function("descend")(byref(forest), fresh, EXPLORATION)
        where = np.arange(trees), held["leaves"]
        logprobs, values = evaluate(network, Boards(held["own"][where], held["stones"][where]))
        priors = np.exp(logprobs)
        _function("absorb")(byref(forest), fresh, priors.ctypes.data, values.ctypes.data)
    visits, totals = held["visits"][:, 0], held["totals"][:, 0]
    return Found(visits, np.divide(totals, np.maximum(visits, 1), dtype=np.float32))
