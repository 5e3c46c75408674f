"""Monte Carlo tree search led by a network, over many games at once.

Each game has a tree of its own, in arrays with one row a game; every simulation goes down all trees together,
so that the network sees one position of each at a time. PUCT of Silver et al., "A general reinforcement
learning algorithm that masters chess, shogi and Go through self-play" (Science 2018). Ends of games that the
search meets are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perilune.connect_four.board import COLUMNS, Boards, has_four, is_full, joined, play
from perilune.connect_four.network import Network
from perilune.connect_four.self_play import Floats, evaluate

EXPLORATION = 1.5
_NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a search of N positions came to.

    Attributes:
        visits: int64[N, 7], simulations that began with each column.
        values: float32[N, 7], their mean outcome for whoever is to move; 0 where there was none.
    """

    visits: NDArray[np.int64]
    values: Floats


class _Trees:
    """Nodes of N trees; a node's number counts within its tree, and 0 is the root."""

    def __init__(self, count: int, nodes: int) -> None:
        self.own = np.zeros((count, nodes), np.uint64)
        self.stones = np.zeros((count, nodes), np.uint64)
        self.children = np.full((count, nodes, COLUMNS), _NONE, np.int64)
        self.priors = np.zeros((count, nodes, COLUMNS), np.float32)
        self.visits = np.zeros((count, nodes, COLUMNS), np.int64)
        self.totals = np.zeros((count, nodes, COLUMNS), np.float32)
        self.worth = np.zeros((count, nodes), np.float32)  # to whoever is to move, as the network sees it
        self.over = np.zeros((count, nodes), np.bool_)  # in which case the worth is exact

    def put(self, network: Network, trees: NDArray[np.int64], node: int, boards: Boards) -> Floats:
        """Make node number `node` of these trees; return what it is worth to whoever is to move."""
        lost, full = has_four(boards.other), is_full(boards)
        priors, values = np.zeros((len(boards), COLUMNS), np.float32), np.zeros(len(boards), np.float32)
        open_ = np.flatnonzero(~(lost | full))
        if len(open_):
            logprobs, values[open_] = evaluate(network, boards[open_])
            priors[open_] = np.exp(logprobs)
        values[lost] = -1.0
        self.own[trees, node], self.stones[trees, node] = boards.own, boards.stones
        self.priors[trees, node] = priors
        self.worth[trees, node], self.over[trees, node] = values, lost | full
        return values

    def choices(self, trees: NDArray[np.int64], nodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """The most promising column of each node; one never tried is taken to be worth what the node is."""
        visits, priors = self.visits[trees, nodes], self.priors[trees, nodes]
        means = self.totals[trees, nodes] / np.maximum(visits, 1)
        means = np.where(visits > 0, means, self.worth[trees, nodes][:, None])
        bonus = EXPLORATION * priors * np.sqrt(visits.sum(axis=1) + 1.0)[:, None] / (1 + visits)
        return np.asarray(np.where(priors > 0, means + bonus, -np.inf).argmax(axis=1))


def search(network: Network, boards: Boards, simulations: int) -> Found:
    """Look ahead from positions of games that are not over."""
    count = len(boards)
    everyone = np.arange(count)
    trees = _Trees(count, simulations + 1)
    trees.put(network, everyone, 0, boards)
    for node in range(1, simulations + 1):
        _simulate(trees, network, everyone, node)
    visits = trees.visits[:, 0]
    values: Floats = np.divide(trees.totals[:, 0], np.maximum(visits, 1), dtype=np.float32)
    return Found(visits, values)


def _simulate(trees: _Trees, network: Network, everyone: NDArray[np.int64], node: int) -> None:
    """Go down every tree to where it ends or a new node, number `node`, is due; tell the way back up."""
    at = np.zeros(len(everyone), np.int64)
    walking = everyone
    path: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []
    worth = np.zeros(len(everyone), np.float32)  # to whoever moved last
    depth = np.zeros(len(everyone), np.int64)
    fresh: list[tuple[NDArray[np.int64], Boards]] = []
    while len(walking):
        nodes = at[walking]
        columns = trees.choices(walking, nodes)
        path.append((walking, nodes, columns))
        depth[walking] += 1
        below = trees.children[walking, nodes, columns]
        new = below == _NONE
        if new.any():
            which = walking[new]
            trees.children[which, nodes[new], columns[new]] = node
            before = Boards(trees.own[which, nodes[new]], trees.stones[which, nodes[new]])
            fresh.append((which, play(before, columns[new])))
        walking, below = walking[~new], below[~new]
        at[walking] = below
        over = trees.over[walking, below]
        worth[walking[over]] = -trees.worth[walking[over], below[over]]
        walking = walking[~over]
    if fresh:
        which = np.concatenate([whose for whose, _ in fresh])
        after = joined(*(boards for _, boards in fresh))
        worth[which] = -trees.put(network, which, node, after)
    for level in reversed(range(len(path))):
        which, nodes, columns = path[level]
        sign = np.where((depth[which] - 1 - level) % 2 == 0, 1.0, -1.0).astype(np.float32)
        trees.visits[which, nodes, columns] += 1
        trees.totals[which, nodes, columns] += sign * worth[which]
