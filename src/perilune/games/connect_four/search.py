"""Monte Carlo tree search guided by a network, over many games at once.

Each game has its own tree. Every simulation descends all trees together, so the network evaluates one
position per game at a time. The search uses PUCT (Silver et al., "A general reinforcement learning algorithm
that masters chess, shogi and Go through self-play", Science 2018), and bounds on exact scores (Cazenave and
Saffidine, "Score bounded Monte-Carlo tree search", Computers and Games 2010). It solves positions near the
end of the game, and no longer visits moves that are proven not to be better than another.
"""

from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perilune.games.connect_four.board import COLUMNS, Boards, score_values
from perilune.games.connect_four.network import Network, evaluate_boards
from perilune.games.connect_four.solver import MIN_SCORE, load_function

EXPLORATION = 1.5

_UNIT = Path(__file__).with_name("search.c")
_FIELDS = "own stones children visits priors totals parents columns values lower upper moves leaves"
_POINTERS = tuple(_FIELDS.split())
_PER_TREE = {"leaves": np.int32}
_PER_NODE = {
    "own": np.uint64,
    "stones": np.uint64,
    "parents": np.int32,
    "columns": np.int8,
    "values": np.float32,
    "lower": np.int8,
    "upper": np.int8,
    "moves": np.uint8,
}
_PER_COLUMN = {"children": np.int32, "visits": np.int32, "priors": np.float32, "totals": np.float32}


@dataclass(frozen=True, slots=True, eq=False)
class SearchResult:
    """The result of searching N positions.

    Attributes:
        visits: int32[N, 7], number of simulations that began with each column.
        values: float32[N, 7], their mean outcome for the player to move, within the proven bounds; for
            columns without simulations, the mean of all simulations.
        candidates: bool[N, 7], legal columns that are not proven to be worse than another, at least one.
        logprobs: float32[N, 7], of the network.
    """

    visits: NDArray[np.int32]
    values: NDArray[np.float32]
    candidates: NDArray[np.bool_]
    logprobs: NDArray[np.float32]

    def improve(self, scale: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return a policy that prefers columns with higher values, and its expected outcome.

        The log-probabilities float32[N, 7] are those of the network plus `scale` times the values, normalized
        (Danihelka et al., "Policy improvement by planning with Gumbel", ICLR 2022, section 4). Columns that
        are not candidates get -inf. The outcomes are float32[N].
        """
        logits = np.where(self.candidates, self.logprobs + np.float32(scale) * self.values, -np.inf)
        logits -= logits.max(axis=1, keepdims=True)
        logprobs = np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), np.float32)
        return logprobs, np.asarray((np.exp(logprobs) * self.values).sum(axis=1), np.float32)


class _Forest(Structure):
    """struct forest of search.c."""

    _fields_ = (*((name, c_void_p) for name in _POINTERS), ("trees", c_int64), ("nodes", c_int64))


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
    begin = load_function(_UNIT, "begin", (POINTER(_Forest),))
    descend = load_function(_UNIT, "descend", (POINTER(_Forest), c_int64, c_float))
    absorb = load_function(_UNIT, "absorb", (POINTER(_Forest), c_int64, c_void_p, c_void_p))
    begin(byref(forest))
    root_logprobs = np.empty((trees, COLUMNS), np.float32)
    for node in range(nodes):
        if node:
            descend(byref(forest), node, EXPLORATION)
        leaves = np.arange(trees), arrays["leaves"]
        logprobs, values = evaluate_boards(network, Boards(arrays["own"][leaves], arrays["stones"][leaves]))
        if not node:
            root_logprobs = logprobs
        priors = np.exp(logprobs)
        absorb(byref(forest), node, priors.ctypes.data, values.ctypes.data)
    return _summarize(arrays, root_logprobs)


def _summarize(arrays: dict[str, NDArray[Any]], logprobs: NDArray[np.float32]) -> SearchResult:
    visits, totals = arrays["visits"][:, 0], arrays["totals"][:, 0]
    searched = np.unpackbits(arrays["moves"][:, :1], axis=1, count=COLUMNS, bitorder="little").view(np.bool_)
    # A move has the bounds of its node, with the sides exchanged. A move without a node has none of its own.
    rows, children = np.arange(len(visits))[:, None], arrays["children"][:, 0]
    lower = np.where(children > 0, -arrays["upper"][rows, children], MIN_SCORE)
    upper = np.where(children > 0, -arrays["lower"][rows, children], arrays["upper"][:, :1])
    best = np.where(searched, lower, -128).max(axis=1, keepdims=True)
    sums = totals.sum(axis=1, keepdims=True) / np.maximum(visits.sum(axis=1, keepdims=True), 1)
    mean = np.clip(sums, score_values(arrays["lower"][:, :1]), score_values(arrays["upper"][:, :1]))
    values = np.where(visits > 0, totals / np.maximum(visits, 1), mean)
    return SearchResult(
        visits,
        np.clip(values, score_values(lower), score_values(upper)).astype(np.float32),
        searched & ((upper > best) | (lower == best)),
        logprobs,
    )
