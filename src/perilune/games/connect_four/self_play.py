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
    empty_boards,
    has_four,
    is_full,
    legal_columns,
    mirror_where,
    play,
    select_boards,
    win_values,
)
from perilune.games.connect_four.network import Floats, Network, evaluate_boards
from perilune.games.connect_four.search import search

_OPENING_SETS = 4  # sets of openings per batch; a game restarts from its opening of the current set
_VALUE_SCALE = 20.0  # weight of the search's values in the policy that the network learns
_DRAWS_PER_MOVE = 2  # random numbers per move: the column, and whether to mirror the board


@dataclass(frozen=True, slots=True, eq=False)
class MoveBatch:
    """T moves of each of G games, as the network saw them.

    Attributes:
        boards: T * G positions, in the order of the moves.
        columns: int64[T, G], the columns played.
        policies: float32[T, G, 7], log-probabilities with which they were sampled.
        values: float32[T + 1, G], for the player to move; the last row is for the final positions.
        rewards: float32[T, G], 0.53 to 1 for a winning move, more if the win is earlier.
        over: bool[T, G], whether the game ended with that move.
    """

    boards: Boards
    columns: NDArray[np.int64]
    policies: Floats
    values: Floats
    rewards: Floats
    over: NDArray[np.bool_]


def sample_columns(logprobs: Floats, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return int64[N]: a column drawn from each row of log-probabilities, by inverse transform sampling."""
    cumulated = np.exp(logprobs.astype(np.float64)).cumsum(axis=1)
    columns: NDArray[np.int64] = (cumulated <= uniform[:, None] * cumulated[:, -1:]).sum(axis=1)
    return np.minimum(columns, COLUMNS - 1)


class SelfPlay:
    """Games in progress.

    Args:
        opening: maximum number of random moves at the start of a game, for a variety of positions.
        simulations: simulations of the search per move; 0 uses the network alone.

    Attributes:
        boards: the current positions.
    """

    def __init__(self, games: int, seed: int, opening: int, simulations: int) -> None:
        self._seed = seed
        self._opening = opening
        self._simulations = simulations
        self.boards = self._draw_openings(games, 0)

    def play(self, network: Network, step: int, moves: int) -> MoveBatch:
        """Play the next `moves` moves of every game. A game that ends is replaced by a new one."""
        count = len(self.boards)
        games = np.arange(count)
        uniform = self._draw_uniforms(step, count, np.arange(moves * _DRAWS_PER_MOVE)).reshape(
            -1, moves, _DRAWS_PER_MOVE
        )
        pool = self._draw_openings(_OPENING_SETS * count, step + 1)
        shape = (moves, count)
        own, stones = np.empty(shape, np.uint64), np.empty(shape, np.uint64)
        columns, over = np.empty(shape, np.int64), np.empty(shape, np.bool_)
        rewards = np.empty(shape, np.float32)
        policies = np.empty((*shape, COLUMNS), np.float32)
        values = np.empty((moves + 1, count), np.float32)
        for turn in range(moves):
            boards = mirror_where(self.boards, uniform[:, turn, 1] < 0.5)
            own[turn], stones[turn] = boards.own, boards.stones
            policies[turn], values[turn] = self._evaluate(network, boards)
            columns[turn] = sample_columns(policies[turn], uniform[:, turn, 0])
            after = play(boards, columns[turn])
            won = has_four(after.other)
            rewards[turn] = won * win_values(after)
            over[turn] = won | is_full(after)
            fresh = pool[turn * _OPENING_SETS // moves * count + games]
            self.boards = select_boards(over[turn], fresh, after)
        values[moves] = self._evaluate(network, self.boards)[1]
        positions = Boards(own.reshape(-1), stones.reshape(-1))
        return MoveBatch(positions, columns, policies, values, rewards, over)

    def _evaluate(self, network: Network, boards: Boards) -> tuple[Floats, Floats]:
        """Return log-probabilities of the columns, and values, from the network or the search."""
        if not self._simulations:
            return evaluate_boards(network, boards)
        return search(network, boards, self._simulations).improve(_VALUE_SCALE)

    def _draw_openings(self, count: int, step: int) -> Boards:
        """Return boards after random moves, skipping moves that would end the game."""
        keys = 1 << 20
        uniform = self._draw_uniforms(step, count, keys + np.arange(self._opening + 1))
        lengths = (uniform[:, 0] * (self._opening + 1)).astype(np.int64)
        boards = empty_boards(count)
        for ply in range(self._opening):
            moved = play(boards, sample_random_columns(boards, uniform[:, ply + 1]))
            boards = select_boards((lengths > ply) & ~has_four(moved.other), moved, boards)
        return boards

    def _draw_uniforms(self, step: int, count: int, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        keys = np.zeros((count, 4), np.uint64)
        keys[:, 0], keys[:, 1], keys[:, 2] = self._seed, step, np.arange(count)
        return uniforms(keys, np.broadcast_to(indices, (count, len(indices))))


def sample_random_columns(boards: Boards, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return int64[N]: a uniformly drawn legal column."""
    with np.errstate(divide="ignore"):
        return sample_columns(np.log(legal_columns(boards).astype(np.float32)), uniform)


def compute_advantages(batch: MoveBatch, trace: float) -> Floats:
    """Return float32[T, G]: undiscounted generalized advantage estimates (Schulman et al., arXiv 1506.02438).

    The players alternate, so the next value and the next advantage count with the opposite sign.
    """
    gae = np.zeros_like(batch.rewards)
    next_advantage = np.zeros_like(batch.rewards[0])
    for turn in reversed(range(len(gae))):
        continues = ~batch.over[turn]
        td_error = batch.rewards[turn] - continues * batch.values[turn + 1] - batch.values[turn]
        next_advantage = td_error - trace * continues * next_advantage
        gae[turn] = next_advantage
    return gae
