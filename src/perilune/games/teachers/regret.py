"""Approximate equilibria by counterfactual regret minimization, in OpenSpiel's C++.

CFR+ (Tammelin 2014, arXiv:1407.5042) traverses the whole game in each iteration. External-sampling MCCFR
(Lanctot et al. 2009) traverses the part that chance and the opponent sample. In two-player zero-sum games the
average policy converges to an equilibrium.
"""

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from perilune.environments.core.keyed_random import KeyedRandom
from perilune.errors import RequestError
from perilune.games.open_spiel_match import is_simultaneous, load_pyspiel
from perilune.games.teachers.table import PolicyTable, load_or_solve

ITERATIONS = {"cfr": 200, "mccfr": 200_000}
MAX_HISTORIES = 1_000_000  # by `estimate_tree_size`
_PLAYOUT_COUNT = 1000  # random games for the estimate
_MAX_ESTIMATE = 1e12  # histories; a larger estimate need not be exact
_TABLE_VERSION = 1  # of the table's keys


class RegretSolver:
    """Approximates an equilibrium, iteration by iteration.

    Args:
        game: a pyspiel game. Simultaneous moves are converted to sequential moves that stay hidden.
        algorithm: "cfr" or "mccfr".
        seed: seed of MCCFR's sampling.

    Attributes:
        game: the game that is solved, with sequential moves.
    """

    def __init__(self, game: Any, algorithm: str, seed: int = 0) -> None:
        spiel = load_pyspiel()
        self.game = spiel.convert_to_turn_based(game) if is_simultaneous(game) else game
        self._is_sampling = algorithm == "mccfr"
        if self._is_sampling:
            self._solver = spiel.ExternalSamplingMCCFRSolver(self.game, seed)
        else:
            self._solver = spiel.CFRPlusSolver(self.game)

    def run(self, iterations: int) -> None:
        step = self._solver.run_iteration if self._is_sampling else self._solver.evaluate_and_update_policy
        for _ in range(iterations):
            step()

    def policy(self) -> Any:
        """Return the average policy as a pyspiel object."""
        return self._solver.average_policy()

    def exploitability(self) -> float:
        """Return NashConv / 2 of the average policy: the mean gain of best responses of both players."""
        return float(load_pyspiel().exploitability(self.game, self.policy()))

    def table(self) -> PolicyTable:
        """Return the average policy by information state; uniform where MCCFR did not visit."""
        if not self._is_sampling:
            rows = self._solver.tabular_average_policy().policy_table()
            return {key: dict(row) for key, row in rows.items()}
        policy, rows, pending = self.policy(), {}, [self.game.new_initial_state()]
        while pending:
            state = pending.pop()
            if state.is_terminal():
                continue
            if not state.is_chance_node():
                key = state.information_state_string(state.current_player())
                if key not in rows:
                    rows[key] = dict(policy.get_state_policy(state))
            pending += [state.child(action) for action in state.legal_actions()]
        return rows


class RegretTeacher:
    """Plays the average policy, a mixed strategy.

    Raises:
        RequestError: if the game is not a two-player zero-sum game, or too large.
    """

    def __init__(self, game: Any, algorithm: str, where: str) -> None:
        self.name = algorithm
        self._prefixed = is_simultaneous(game)
        kind = game.get_type()
        if game.num_players() != 2 or kind.utility != load_pyspiel().GameType.Utility.ZERO_SUM:
            raise RequestError(f"{algorithm} needs a two-player zero-sum game", where=where)
        if not kind.provides_information_state_string:
            raise RequestError(f"'{kind.short_name}' has no text for information states", where=where)
        size = estimate_tree_size(game)
        if size > MAX_HISTORIES:
            raise RequestError(
                f"{game} has about {size:.0e} histories; {algorithm} supports up to {MAX_HISTORIES:,}",
                where=where,
                remedy="make the game smaller with `config`, such as {num_cards: 4} for goofspiel",
            )
        request = {
            "form": _TABLE_VERSION,
            "game": str(game),
            "algorithm": algorithm,
            "open_spiel": open_spiel_version(),
            "iterations": ITERATIONS[algorithm],
            "seed": 0,
        }
        self.table = load_or_solve(request, lambda: _solve(game, algorithm))

    def probabilities(self, state: Any, player: int, seed: int) -> Mapping[int, float]:
        """Return the probabilities of the average policy."""
        prefix = f"Current player: {player}\n" if self._prefixed else ""
        return self.table[prefix + state.information_state_string(player)]


def _solve(game: Any, algorithm: str) -> PolicyTable:
    solver = RegretSolver(game, algorithm)
    solver.run(ITERATIONS[algorithm])
    return solver.table()


def estimate_tree_size(game: Any) -> float:
    """Estimate the number of histories of a game from random games (Knuth 1975, unbiased)."""
    total = 0.0
    for number in range(_PLAYOUT_COUNT):
        rng, state, width = KeyedRandom(0, f"{game}/{number}"), game.new_initial_state(), 1.0
        while not state.is_terminal() and width < _MAX_ESTIMATE:
            turn = len(state.full_history())
            movers = range(state.num_players()) if state.is_simultaneous_node() else (None,)
            legal = [state.legal_actions() if seat is None else state.legal_actions(seat) for seat in movers]
            moves = [int(rng.choice(actions, turn, seat)) for seat, actions in enumerate(legal)]
            for actions in legal:
                width *= len(actions)
                total += width
            state.apply_actions(moves) if state.is_simultaneous_node() else state.apply_action(moves[0])
    return total / _PLAYOUT_COUNT


def open_spiel_version() -> str:
    """Return the installed version of OpenSpiel, which determines the keys of a table."""
    return importlib.metadata.version("open_spiel")
