"""Equilibria of games with hidden cards or simultaneous moves, by regret minimisation, in OpenSpiel's C++.

CFR+ (Tammelin 2014, arXiv:1407.5042) walks the whole game in each iteration; external-sampling MCCFR
(Lanctot et al. 2009) walks a part that chance and the opponent draw. Their average policy nears an
equilibrium of a zero-sum game of two players.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perilune.environments.core.keyed_random import KeyedRandom
from perilune.errors import RequestError
from perilune.games.open_spiel_match import is_simultaneous, pyspiel
from perilune.games.teachers.table import PolicyTable, solved

ITERATIONS = {"cfr": 200, "mccfr": 200_000}
LARGEST = 1_000_000  # histories, as estimated
_PLAYOUTS = 1000  # of the estimate
_HOPELESS = 1e12  # histories, from which on an estimate need not be exact
_FORM = 1  # of the table; another one when its keys change


class RegretSolver:
    """Nears an equilibrium, iteration by iteration.

    Args:
        game: of pyspiel; where players move at the same time it is solved as if one after another, unseen.
        algorithm: "cfr" or "mccfr".
        seed: of what MCCFR draws.

    Attributes:
        game: the one that is solved, in which players move one after another.
    """

    def __init__(self, game: Any, algorithm: str, seed: int = 0) -> None:
        spiel = pyspiel()
        self.game = spiel.convert_to_turn_based(game) if is_simultaneous(game) else game
        self._samples = algorithm == "mccfr"
        self._solver = (
            spiel.ExternalSamplingMCCFRSolver(self.game, seed)
            if self._samples
            else spiel.CFRPlusSolver(self.game)
        )

    def run(self, iterations: int) -> None:
        """Go on."""
        step = self._solver.run_iteration if self._samples else self._solver.evaluate_and_update_policy
        for _ in range(iterations):
            step()

    def policy(self) -> Any:
        """The average policy, as pyspiel has it."""
        return self._solver.average_policy()

    def exploitability(self) -> float:
        """What the best answers to the average policy win, on average over seats: NashConv / 2."""
        return float(pyspiel().exploitability(self.game, self.policy()))

    def table(self) -> PolicyTable:
        """The average policy, a row for each information state; uniform where MCCFR never was."""
        if not self._samples:
            rows = self._solver.tabular_average_policy().policy_table()
            return PolicyTable.of({key: dict(row) for key, row in rows.items()})
        policy, found, pending = self.policy(), {}, [self.game.new_initial_state()]
        while pending:
            state = pending.pop()
            if state.is_terminal():
                continue
            if not state.is_chance_node():
                key = state.information_state_string(state.current_player())
                if key not in found:
                    found[key] = dict(policy.get_state_policy(state))
            pending += [state.child(action) for action in state.legal_actions()]
        return PolicyTable.of(found)


class RegretTeacher:
    """Plays the average policy: mixed, as an equilibrium of such a game has to be.

    Raises:
        RequestError: when the game is not a zero-sum one of two players, or is too large to be solved.
    """

    def __init__(self, game: Any, algorithm: str, where: str) -> None:
        self.name = algorithm
        self._prefixed = is_simultaneous(game)
        kind = game.get_type()
        if game.num_players() != 2 or kind.utility != pyspiel().GameType.Utility.ZERO_SUM:
            raise RequestError(f"{algorithm} solves zero-sum games of two players", where=where)
        if not kind.provides_information_state_string:
            raise RequestError(f"'{kind.short_name}' does not say what a player has seen", where=where)
        size = tree_size(game)
        if size > LARGEST:
            raise RequestError(
                f"{game} has about {size:.0e} histories, and {algorithm} is for {LARGEST:,}",
                where=where,
                remedy="make the game smaller with `config`, as {num_cards: 4} of goofspiel",
            )
        request = {
            "form": _FORM, "game": str(game), "algorithm": algorithm, "iterations": ITERATIONS[algorithm],
            "seed": 0, "open_spiel": version(),
        }  # fmt: skip
        self.table = solved(request, lambda: _solve(game, algorithm))

    def probabilities(self, state: Any, player: int, seed: int) -> Mapping[int, float]:
        """Those of the average policy."""
        prefix = f"Current player: {player}\n" if self._prefixed else ""
        return self.table.row(prefix + state.information_state_string(player))


def _solve(game: Any, algorithm: str) -> PolicyTable:
    solver = RegretSolver(game, algorithm)
    solver.run(ITERATIONS[algorithm])
    return solver.table()


def tree_size(game: Any, seed: int = 0) -> float:
    """About how many histories a game has: Knuth's estimate (1975) from random games, unbiased."""
    total = 0.0
    for number in range(_PLAYOUTS):
        rng, state, width = KeyedRandom(seed, f"{game}/{number}"), game.new_initial_state(), 1.0
        while not state.is_terminal() and width < _HOPELESS:
            turn = len(state.full_history())
            movers = range(state.num_players()) if state.is_simultaneous_node() else (None,)
            legal = [state.legal_actions() if who is None else state.legal_actions(who) for who in movers]
            moves = [int(rng.choice(some, turn, who)) for who, some in enumerate(legal)]
            for some in legal:
                width *= len(some)
                total += width
            state.apply_actions(moves) if state.is_simultaneous_node() else state.apply_action(moves[0])
    return total / _PLAYOUTS


def version() -> str:
    """Of OpenSpiel, which decides how it names what a player has seen."""
    from importlib.metadata import version as installed

    return installed("open_spiel")
