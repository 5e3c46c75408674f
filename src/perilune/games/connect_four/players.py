"""Who can play: each is asked for many games at once, and given a uniform number for each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from perilune.errors import RequestError
from perilune.games.connect_four.board import (
    BOTTOM_SQUARES,
    COLUMN_SQUARES,
    ROWS,
    Boards,
    Columns,
    completing,
    legal,
    plies,
)
from perilune.games.connect_four.network import Network, evaluate
from perilune.games.connect_four.search import search
from perilune.games.connect_four.self_play import drawn
from perilune.games.connect_four.solver import Solver, foreseen

_GOES_ON = {"is_terminal": False, "winner": ""}


class Player(Protocol):
    """Chooses columns."""

    def __call__(self, boards: Boards, uniform: NDArray[np.float64]) -> Columns:
        """int64[N]: a column with room for each of N games that are not over."""
        ...


def among_best(worth: NDArray[Any], uniform: NDArray[np.float64]) -> Columns:
    """int64[N]: one of the columns worth most, all of these equally likely."""
    best = worth == worth.max(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        return drawn(np.log(best.astype(np.float32)), uniform)


def random_player(boards: Boards, uniform: NDArray[np.float64]) -> Columns:
    """Any column that has room."""
    return among_best(legal(boards), uniform)


def one_ply(boards: Boards, uniform: NDArray[np.float64]) -> Columns:
    """Wins where it can, else blocks where it must, else plays any column."""
    squares = (boards.stones[:, None] + BOTTOM_SQUARES) & COLUMN_SQUARES
    wins = squares & completing(boards.own, boards.stones)[:, None]
    blocks = squares & completing(boards.other, boards.stones)[:, None]
    return among_best(np.where(wins, 3, np.where(blocks, 2, legal(boards))), uniform)


@dataclass(frozen=True, slots=True)
class Foresight:
    """Looks at every line of so many moves: avoids losing within them, wins where it can force it."""

    moves: int

    def __call__(self, boards: Boards, uniform: NDArray[np.float64]) -> Columns:
        return among_best(foreseen(boards, self.moves), uniform)


@dataclass(frozen=True, slots=True, eq=False)
class Perfect:
    """Plays what is worth most; with few stones on the board it has long to think."""

    solver: Solver

    def __call__(self, boards: Boards, uniform: NDArray[np.float64]) -> Columns:
        return among_best(self.solver.column_scores(boards), uniform)


@dataclass(frozen=True, slots=True, eq=False)
class Intuition:
    """The network's likeliest column, without looking ahead."""

    network: Network

    def __call__(self, boards: Boards, uniform: NDArray[np.float64]) -> Columns:
        return np.asarray(evaluate(self.network, boards)[0].argmax(axis=1))


@dataclass(frozen=True, slots=True, eq=False)
class Searching:
    """The column that a search led by the network came back to most."""

    network: Network
    simulations: int

    def __call__(self, boards: Boards, uniform: NDArray[np.float64]) -> Columns:
        found = search(self.network, boards, self.simulations)
        return np.asarray((found.visits + 0.5 * found.values).argmax(axis=1))


class TreeSearch:
    """OpenSpiel's Monte Carlo tree search with random playouts and its solver for ends of games.

    Raises:
        RequestError: where OpenSpiel is not installed.
    """

    def __init__(self, simulations: int, seed: int) -> None:
        try:
            pyspiel = import_module("pyspiel")
        except ImportError:
            raise RequestError("OpenSpiel is not installed", remedy="pip install 'perilune[games]'") from None
        self._game = pyspiel.load_game("connect_four")
        playouts = pyspiel.RandomRolloutEvaluator(n_rollouts=1, seed=seed)
        self._bot = pyspiel.MCTSBot(
            self._game, playouts, uct_c=2.0, max_simulations=simulations, max_memory_mb=200, solve=True,
            seed=seed, verbose=False,
        )  # fmt: skip

    def __call__(self, boards: Boards, uniform: NDArray[np.float64]) -> Columns:
        return np.array(
            [self._bot.step(self._state(boards[index : index + 1])) for index in range(len(boards))]
        )

    def _state(self, board: Boards) -> Any:
        """The position as OpenSpiel writes it: x began, rows from below."""
        x_moves = plies(board)[0] % 2 == 0
        x, o = (board.own, board.other) if x_moves else (board.other, board.own)
        squares = [
            [
                "x" if x[0] & square else "o" if o[0] & square else "."
                for square in BOTTOM_SQUARES << np.uint64(row)
            ]
            for row in range(ROWS)
        ]
        return self._game.new_initial_state(
            json.dumps({"board": squares, "current_player": "x" if x_moves else "o"} | _GOES_ON)
        )


def playing(network: Network, simulations: int) -> Player:
    """The network, looking ahead so many simulations; 0 is not at all."""
    return Searching(network, simulations) if simulations else Intuition(network)


def opponent(name: str, solver: Solver, seed: int) -> Player:
    """`random`, `one_ply`, `perfect`, `foresight_N` of N moves, or `mcts_N` of N simulations.

    Raises:
        RequestError: when there is none of that name, or OpenSpiel is not there for `mcts`.
    """
    kind, _, number = name.partition("_")
    if name == "one_ply":
        return one_ply
    if kind == "random":
        return random_player
    if kind == "perfect":
        return Perfect(solver)
    if kind == "foresight":
        return Foresight(int(number))
    if kind == "mcts":
        return TreeSearch(int(number), seed)
    raise RequestError(f"no Connect Four player is called '{name}'")
