"""Self-play in batches of moves, and the advantage of each move.

Every random number is a function of (seed, step, game, purpose). The same seed plays the same games, and the
boards are the only state.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perilune.engine.random import uniforms
from perilune.games.connect_four.board import (
    COLUMNS,
    Boards,
    empty,
    has_four,
    is_full,
    legal,
    mirrored_where,
    play,
    where,
)
from perilune.games.connect_four.network import Floats, Network, evaluate
from perilune.games.connect_four.search import search

_POOLS = 4  # sets of openings per batch; a game restarts from its opening of the current set
_DRAWS = 2  # random numbers per move: the column, and whether to mirror the board


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """T moves of each of G games, as the network saw them.

    Attributes:
        boards: T * G positions, in the order of the moves.
        columns: int64[T, G], the columns played.
        policies: float32[T, G, 7], log-probabilities with which they were sampled.
        values: float32[T + 1, G], for the player to move; the last row is for the final positions.
        rewards: float32[T, G], 1 for a winning move.
        over: bool[T, G], whether the game ended with that move.
    """

    boards: Boards
    columns: NDArray[np.int64]
    policies: Floats
    values: Floats
    rewards: Floats
    over: NDArray[np.bool_]


def drawn(logprobs: Floats, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return int64[N]: a column drawn from each row of log-probabilities, by inverse transform sampling."""
    cumulated = np.exp(logprobs.astype(np.float64)).cumsum(axis=1)
    columns: NDArray[np.int64] = (cumulated <= uniform[:, None] * cumulated[:, -1:]).sum(axis=1)
    return np.minimum(columns, COLUMNS - 1)


class SelfPlay:
    """Games in progress.

    Args:
        opening: maximum random moves at the start of a game, for a variety of positions.
        simulations: simulations of the search per move; 0 uses the network alone.

    Attributes:
        boards: the current positions.
    """

    def __init__(self, games: int, seed: int, opening: int, simulations: int) -> None:
        self._seed = seed
        self._opening = opening
        self._simulations = simulations
        self.boards = self._openings(games, 0)

    def play(self, network: Network, step: int, moves: int) -> Stretch:
        """Play the next `moves` moves of every game. A game that ends is replaced by a new one."""
        count = len(self.boards)
        games = np.arange(count)
        uniform = self._uniforms(step, count, np.arange(moves * _DRAWS)).reshape(-1, moves, _DRAWS)
        pool = self._openings(_POOLS * count, step + 1)
        shape = (moves, count)
        own, stones = np.empty(shape, np.uint64), np.empty(shape, np.uint64)
        columns, won, over = np.empty(shape, np.int64), np.empty(shape, np.bool_), np.empty(shape, np.bool_)
        policies = np.empty((*shape, COLUMNS), np.float32)
        values = np.empty((moves + 1, count), np.float32)
        for turn in range(moves):
            boards = mirrored_where(self.boards, uniform[:, turn, 1] < 0.5)
            own[turn], stones[turn] = boards.own, boards.stones
            policies[turn], values[turn] = self._evaluate(network, boards)
            columns[turn] = drawn(policies[turn], uniform[:, turn, 0])
            after = play(boards, columns[turn])
            won[turn] = has_four(after.other)
            over[turn] = won[turn] | is_full(after)
            fresh = pool[turn * _POOLS // moves * count + games]
            self.boards = where(over[turn], fresh, after)
        values[moves] = self._evaluate(network, self.boards)[1]
        seen = Boards(own.reshape(-1), stones.reshape(-1))
        return Stretch(seen, columns, policies, values, won.astype(np.float32), over)

    def _evaluate(self, network: Network, boards: Boards) -> tuple[Floats, Floats]:
        """Return log-probabilities of the columns, and values, from the network or the search."""
        if not self._simulations:
            return evaluate(network, boards)
        result = search(network, boards, self._simulations)
        with np.errstate(divide="ignore"):
            return np.log(result.visits / np.float32(self._simulations)), result.worth

    def _openings(self, count: int, step: int) -> Boards:
        """Return boards after random moves, skipping moves that would end the game."""
        keys = 1 << 20
        uniform = self._uniforms(step, count, keys + np.arange(self._opening + 1))
        lengths = (uniform[:, 0] * (self._opening + 1)).astype(np.int64)
        boards = empty(count)
        for ply in range(self._opening):
            moved = play(boards, random_columns(boards, uniform[:, ply + 1]))
            boards = where((lengths > ply) & ~has_four(moved.other), moved, boards)
        return boards

    def _uniforms(self, step: int, count: int, places: NDArray[np.int64]) -> NDArray[np.float64]:
        keys = np.zeros((count, 4), np.uint64)
        keys[:, 0], keys[:, 1], keys[:, 2] = self._seed, step, np.arange(count)
        return uniforms(keys, np.broadcast_to(places, (count, len(places))))


def random_columns(boards: Boards, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return int64[N]: a uniformly drawn legal column."""
    with np.errstate(divide="ignore"):
        return drawn(np.log(legal(boards).astype(np.float32)), uniform)


def advantages(stretch: Stretch, trace: float) -> Floats:
    """float32[T, G]: generalized advantage estimation (Schulman et al., arXiv 1506.02438), undiscounted.

    The players alternate, so the next value and the next advantage count with the opposite sign.
    """
    gae = np.zeros_like(stretch.rewards)
    following = np.zeros_like(stretch.rewards[0])
    for turn in reversed(range(len(gae))):
        continues = ~stretch.over[turn]
        td_error = stretch.rewards[turn] - continues * stretch.values[turn + 1] - stretch.values[turn]
        following = td_error - trace * continues * following
        gae[turn] = following
    return gae
