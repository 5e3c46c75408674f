"""Games that a network plays against itself, a stretch of moves at a time, and what each move was worth.

Every random number is a function of (seed, stretch, game, purpose): the same seed plays the same games, and
nothing but the boards has to be kept to go on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from perilune.connect_four.board import (
    COLUMNS,
    Boards,
    empty,
    has_four,
    is_full,
    legal,
    mirrored_where,
    planes,
    play,
)
from perilune.connect_four.network import Network
from perilune.engine.random import uniforms

OPENING_PLIES = 6  # a game may start with as many random moves: too few for a line of four
_DRAWS = 2  # a move: which column, which side of the mirror

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """T moves of each of G games, as the network saw them when it played.

    Attributes:
        boards: T * G positions, in the order of the moves.
        columns: int64[T, G] that were played.
        logprobs: float32[T, G] of those columns.
        values: float32[T + 1, G], for whoever was to move; the last are of where the stretch ends.
        rewards: float32[T, G], 1 for the move that won.
        over: bool[T, G], after that move.
    """

    boards: Boards
    columns: NDArray[np.int64]
    logprobs: Floats
    values: Floats
    rewards: Floats
    over: NDArray[np.bool_]


def evaluate(network: Network, boards: Boards) -> tuple[Floats, Floats]:
    """Log-probabilities float32[N, 7], -inf where a column is full, and values float32[N]."""
    with torch.inference_mode():
        logits, values = network(torch.from_numpy(planes(boards)))
        return masked_logprobs(logits, torch.from_numpy(legal(boards))).numpy(), values.numpy()


def masked_logprobs(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Log-softmax over the allowed columns; -inf elsewhere."""
    return logits.masked_fill(~allowed, float("-inf")).log_softmax(dim=1)


def drawn(logprobs: Floats, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """int64[N]: one column of each row, by its place in the cumulated probabilities."""
    cumulated = np.exp(logprobs.astype(np.float64)).cumsum(axis=1)
    columns: NDArray[np.int64] = (cumulated <= uniform[:, None] * cumulated[:, -1:]).sum(axis=1)
    return np.minimum(columns, COLUMNS - 1)


class SelfPlay:
    """Games under way.

    Attributes:
        boards: where they stand.
    """

    def __init__(self, games: int, seed: int) -> None:
        self._seed = seed
        self.boards = self._openings(np.arange(games), step=0, turn=0)

    def play(self, network: Network, step: int, moves: int) -> Stretch:
        """The next `moves` moves of every game; a game that ends is followed by another."""
        games = np.arange(len(self.boards))
        chance = self._uniforms(step, games, np.arange(moves * _DRAWS)).reshape(-1, moves, _DRAWS)
        shape = (moves, len(games))
        own, stones = np.empty(shape, np.uint64), np.empty(shape, np.uint64)
        columns, won, over = np.empty(shape, np.int64), np.empty(shape, np.bool_), np.empty(shape, np.bool_)
        logprobs, values = np.empty(shape, np.float32), np.empty((moves + 1, len(games)), np.float32)
        for turn in range(moves):
            boards = mirrored_where(self.boards, chance[:, turn, 1] < 0.5)
            own[turn], stones[turn] = boards.own, boards.stones
            found, values[turn] = evaluate(network, boards)
            columns[turn] = drawn(found, chance[:, turn, 0])
            logprobs[turn] = found[games, columns[turn]]
            after = play(boards, columns[turn])
            won[turn] = has_four(after.other)
            over[turn] = won[turn] | is_full(after)
            self.boards = self._renewed(after, over[turn], step, turn + 1)
        values[moves] = evaluate(network, self.boards)[1]
        seen = Boards(own.reshape(-1), stones.reshape(-1))
        return Stretch(seen, columns, logprobs, values, won.astype(np.float32), over)

    def _renewed(self, boards: Boards, over: NDArray[np.bool_], step: int, turn: int) -> Boards:
        which = np.flatnonzero(over)
        if not len(which):
            return boards
        own, stones = boards.own.copy(), boards.stones.copy()
        fresh = self._openings(which, step, turn)
        own[which], stones[which] = fresh.own, fresh.stones
        return Boards(own, stones)

    def _openings(self, games: NDArray[np.int64], step: int, turn: int) -> Boards:
        """Boards after 0 to OPENING_PLIES random moves, so that more is met than the network would play."""
        places = (1 << 20) + turn * (OPENING_PLIES + 1) + np.arange(OPENING_PLIES + 1)
        chance = self._uniforms(step, games, places)
        lengths = (chance[:, 0] * (OPENING_PLIES + 1)).astype(np.int64)
        boards = empty(len(games))
        for ply in range(OPENING_PLIES):
            moved = play(boards, random_columns(boards, chance[:, ply + 1]))
            goes_on = lengths > ply
            boards = Boards(
                np.where(goes_on, moved.own, boards.own), np.where(goes_on, moved.stones, boards.stones)
            )
        return boards

    def _uniforms(
        self, step: int, games: NDArray[np.int64], places: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        keys = np.zeros((len(games), 4), np.uint64)
        keys[:, 0], keys[:, 1], keys[:, 2] = self._seed, step, games
        return uniforms(keys, np.broadcast_to(places, (len(games), len(places))))


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
