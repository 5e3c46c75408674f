"""Players. Each is called with many games at once and one uniform random number per game."""

import json
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from perilune.errors import RequestError, requires_extra
from perilune.games.connect_four.board import (
    BOTTOM_SQUARES,
    COLUMN_SQUARES,
    ROWS,
    Boards,
    Columns,
    completing_squares,
    count_plies,
    legal_columns,
)
from perilune.games.connect_four.network import Network, evaluate_boards
from perilune.games.connect_four.search import search
from perilune.games.connect_four.self_play import sample_columns
from perilune.games.connect_four.solver import Solver, find_forced_outcomes

_UNFINISHED = {"is_terminal": False, "winner": ""}


class Player(Protocol):
    """Chooses columns."""

    def __call__(self, boards: Boards, uniform: NDArray[np.float64]) -> Columns:
        """Return int64[N]: a legal column for each of N unfinished games."""


def sample_best(worth: NDArray[Any], uniform: NDArray[np.float64]) -> Columns:
    """Return int64[N]: a uniformly drawn column among those with the highest worth, of `worth` [N, 7]."""
    best = worth == worth.max(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        return sample_columns(np.log(best.astype(np.float32)), uniform)


def random_player(boards: Boards, uniform: NDArray[np.float64]) -> Columns:
    return sample_best(legal_columns(boards), uniform)


def one_ply(boards: Boards, uniform: NDArray[np.float64]) -> Columns:
    """Wins if possible, else blocks if necessary, else plays a random legal column."""
    squares = (boards.stones[:, None] + BOTTOM_SQUARES) & COLUMN_SQUARES
    wins = squares & completing_squares(boards.own, boards.stones)[:, None]
    blocks = squares & completing_squares(boards.other, boards.stones)[:, None]
    return sample_best(np.where(wins, 3, np.where(blocks, 2, legal_columns(boards))), uniform)


@dataclass(frozen=True, slots=True)
class LookaheadPlayer:
    """Searches all lines of `moves` moves, avoids losses in them and plays forced wins."""

    moves: int

    def __call__(self, boards: Boards, uniform: NDArray[np.float64]) -> Columns:
        return sample_best(find_forced_outcomes(boards, self.moves), uniform)


@dataclass(frozen=True, slots=True, eq=False)
class PerfectPlayer:
    """Plays a move with the highest exact score. Slow with few stones on the board."""

    solver: Solver

    def __call__(self, boards: Boards, uniform: NDArray[np.float64]) -> Columns:
        return sample_best(self.solver.column_scores(boards), uniform)


@dataclass(frozen=True, slots=True, eq=False)
class NetworkPlayer:
    """Plays the network's most probable column, without search."""

    network: Network

    def __call__(self, boards: Boards, uniform: NDArray[np.float64]) -> Columns:
        return np.asarray(evaluate_boards(self.network, boards)[0].argmax(axis=1))


@dataclass(frozen=True, slots=True, eq=False)
class SearchPlayer:
    """Plays the column with the most visits of a search that the network guides."""

    network: Network
    simulations: int

    def __call__(self, boards: Boards, uniform: NDArray[np.float64]) -> Columns:
        result = search(self.network, boards, self.simulations)
        return np.asarray(np.where(result.candidates, result.visits + 0.5 * result.values, -1).argmax(axis=1))


class OpenSpielSearchPlayer:
    """OpenSpiel's Monte Carlo tree search with random rollouts and exact endings.

    Raises:
        RequestError: if OpenSpiel is not installed.
    """

    def __init__(self, simulations: int, seed: int) -> None:
        with requires_extra("games", "OpenSpiel is not installed"):
            pyspiel = import_module("pyspiel")
        self._game = pyspiel.load_game("connect_four")
        rollouts = pyspiel.RandomRolloutEvaluator(n_rollouts=1, seed=seed)
        options = {"uct_c": 2.0, "max_simulations": simulations, "max_memory_mb": 200, "solve": True}
        self._bot = pyspiel.MCTSBot(self._game, rollouts, **options, seed=seed, verbose=False)

    def __call__(self, boards: Boards, uniform: NDArray[np.float64]) -> Columns:
        return np.array(
            [self._bot.step(self._state(boards[index : index + 1])) for index in range(len(boards))]
        )

    def _state(self, board: Boards) -> Any:
        """Return the position in OpenSpiel's format: x moved first, rows from below."""
        x_moves = count_plies(board)[0] % 2 == 0
        x, o = (board.own, board.other) if x_moves else (board.other, board.own)
        squares = [
            [
                "x" if x[0] & square else "o" if o[0] & square else "."
                for square in BOTTOM_SQUARES << np.uint64(row)
            ]
            for row in range(ROWS)
        ]
        return self._game.new_initial_state(
            json.dumps({"board": squares, "current_player": "x" if x_moves else "o"} | _UNFINISHED)
        )


def make_network_player(network: Network, simulations: int) -> Player:
    """Return a player that uses the network with this many simulations per move; 0 for no search."""
    return SearchPlayer(network, simulations) if simulations else NetworkPlayer(network)


def make_opponent(name: str, solver: Solver, seed: int) -> Player:
    """Make a player: `random`, `one_ply`, `perfect`, `foresight_N` (N moves) or `mcts_N` (N simulations).

    Raises:
        RequestError: if the name is unknown, or `mcts` needs OpenSpiel and it is not installed.
    """
    kind, _, number = name.partition("_")
    if name == "one_ply":
        return one_ply
    if kind == "random":
        return random_player
    if kind == "perfect":
        return PerfectPlayer(solver)
    if kind == "foresight":
        return LookaheadPlayer(int(number))
    if kind == "mcts":
        return OpenSpielSearchPlayer(int(number), seed)
    raise RequestError(f"no Connect Four player is called '{name}'")
