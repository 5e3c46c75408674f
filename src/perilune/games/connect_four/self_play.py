"""Games that a network plays against itself, a stretch of moves at a time, and what each move was worth.

Every random number is a function of (seed, stretch, game, purpose): the same seed plays the same games, and
nothing but the boards has to be kept to go on.
"""

from __future__ import annotations

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

_POOLS = 4  # of openings in a stretch: a game that ends twice within a pool's share of it starts alike
_DRAWS = 2  # a move: which column, which side of the mirror


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """T moves of each of G games, as the network saw them when it played.

    Attributes:
        boards: T * G positions, in the order of the moves.
        columns: int64[T, G] that were played.
        policies: float32[T, G, 7], log-probabilities that they were drawn from.
        values: float32[T + 1, G], for whoever was to move; the last are of where the stretch ends.
        rewards: float32[T, G], 1 for the move that won.
        over: bool[T, G], after that move.
    """

    boards: Boards
    columns: NDArray[np.int64]
    policies: Floats
    values: Floats
    rewards: Floats
    over: NDArray[np.bool_]


def drawn(logprobs: Floats, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """int64[N]: one column of each row, by its place in the cumulated probabilities."""
    cumulated = np.exp(logprobs.astype(np.float64)).cumsum(axis=1)
    columns: NDArray[np.int64] = (cumulated <= uniform[:, None] * cumulated[:, -1:]).sum(axis=1)
    return np.minimum(columns, COLUMNS - 1)


class SelfPlay:
    """Games under way.

    Args:
        opening: a game starts after 0 to as many random moves, so that more is met than what is played well.
        simulations: how far each move is searched; 0 takes what the network says.

    Attributes:
        boards: where they stand.
    """

    def __init__(self, games: int, seed: int, opening: int, simulations: int) -> None:
        self._seed = seed
        self._opening = opening
        self._simulations = simulations
        self.boards = self._openings(games, 0)

    def play(self, network: Network, step: int, moves: int) -> Stretch:
        """The next `moves` moves of every game; a game that ends is followed by another."""
        count = len(self.boards)
        games = np.arange(count)
        chance = self._uniforms(step, count, np.arange(moves * _DRAWS)).reshape(-1, moves, _DRAWS)
        pool = self._openings(_POOLS * count, step + 1)
        shape = (moves, count)
        own, stones = np.empty(shape, np.uint64), np.empty(shape, np.uint64)
        columns, won, over = np.empty(shape, np.int64), np.empty(shape, np.bool_), np.empty(shape, np.bool_)
        policies = np.empty((*shape, COLUMNS), np.float32)
        values = np.empty((moves + 1, count), np.float32)
        for turn in range(moves):
            boards = mirrored_where(self.boards, chance[:, turn, 1] < 0.5)
            own[turn], stones[turn] = boards.own, boards.stones
            policies[turn], values[turn] = self._considered(network, boards)
            columns[turn] = drawn(policies[turn], chance[:, turn, 0])
            after = play(boards, columns[turn])
            won[turn] = has_four(after.other)
            over[turn] = won[turn] | is_full(after)
            fresh = pool[turn * _POOLS // moves * count + games]
            self.boards = where(over[turn], fresh, after)
        values[moves] = self._considered(network, self.boards)[1]
        seen = Boards(own.reshape(-1), stones.reshape(-1))
        return Stretch(seen, columns, policies, values, won.astype(np.float32), over)

    def _considered(self, network: Network, boards: Boards) -> tuple[Floats, Floats]:
        """What to play with which log-probability, and what the positions are worth."""
        if not self._simulations:
            return evaluate(network, boards)
        found = search(network, boards, self._simulations)
        with np.errstate(divide="ignore"):
            return np.log(found.visits / np.float32(self._simulations)), found.worth

    def _openings(self, count: int, step: int) -> Boards:
        """Boards after random moves; one is left out where it would end the game."""
        keys = 1 << 20
        chance = self._uniforms(step, count, keys + np.arange(self._opening + 1))
        lengths = (chance[:, 0] * (self._opening + 1)).astype(np.int64)
        boards = empty(count)
        for ply in range(self._opening):
            moved = play(boards, random_columns(boards, chance[:, ply + 1]))
            boards = where((lengths > ply) & ~has_four(moved.other), moved, boards)
        return boards

    def _uniforms(self, step: int, count: int, places: NDArray[np.int64]) -> NDArray[np.float64]:
        keys = np.zeros((count, 4), np.uint64)
        keys[:, 0], keys[:, 1], keys[:, 2] = self._seed, step, np.arange(count)
        return uniforms(keys, np.broadcast_to(places, (count, len(places))))


def random_columns(boards: Boards, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """int64[N]: a column that has room, all equally likely."""
    with np.errstate(divide="ignore"):
        return drawn(np.log(legal(boards).astype(np.float32)), uniform)


def advantages(stretch: Stretch, trace: float) -> Floats:
    """float32[T, G]: generalized advantage estimation (Schulman et al., arXiv 1506.02438), undiscounted.

    What is good for the next to move is bad for this one, so that both the next value and the next advantage
    count against it.
    """
    found = np.zeros_like(stretch.rewards)
    following = np.zeros_like(stretch.rewards[0])
    for turn in reversed(range(len(found))):
        goes_on = ~stretch.over[turn]
        surprise = stretch.rewards[turn] - goes_on * stretch.values[turn + 1] - stretch.values[turn]
        following = surprise - trace * goes_on * following
        found[turn] = following
    return found
