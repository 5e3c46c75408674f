"""Perfect play of small games with perfect information, by backward induction over all positions."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from perilune.errors import RequestError
from perilune.games.teachers.regret import open_spiel_version
from perilune.games.teachers.table import PolicyTable, load_or_solve

SUPPORTED_GAMES = frozenset({"tic_tac_toe", "hex", "clobber", "connect_four"})  # the history does not matter
MAX_POSITIONS = 300_000
_TABLE_VERSION = 1


class Value(NamedTuple):
    """The value of a position under perfect play.

    Attributes:
        returns: the return of player 0.
        moves: moves to the end, if the loser resists as long as possible.
    """

    returns: float
    moves: int


class MinimaxTeacher:
    """Plays all best moves with equal probability: those that win soonest, or lose latest, or draw.

    Raises:
        RequestError: if the game is not in `SUPPORTED_GAMES`, or has too many positions.
    """

    name = "minimax"

    def __init__(self, game: Any, where: str) -> None:
        name = game.get_type().short_name
        if name not in SUPPORTED_GAMES:
            remedy = f"one of: {', '.join(sorted(SUPPORTED_GAMES))}"
            raise RequestError(f"minimax cannot play '{name}'", where=where, remedy=remedy)
        request = {
            "form": _TABLE_VERSION,
            "game": str(game),
            "algorithm": "minimax",
            "open_spiel": open_spiel_version(),
        }
        self.table = load_or_solve(request, lambda: _solve(game, where))

    def probabilities(self, state: Any, player: int, seed: int) -> Mapping[int, float]:
        """Return equal probabilities for all best moves."""
        return self.table[str(state)]


def _solve(game: Any, where: str) -> PolicyTable:
    values: dict[str, Value] = {}
    best: dict[str, dict[int, float]] = {}

    def value(state: Any) -> Value:
        if state.is_terminal():
            return Value(float(state.returns()[0]), 0)
        position = str(state)
        if position in values:
            return values[position]
        if len(values) == MAX_POSITIONS:
            raise RequestError(
                f"{game} has more than {MAX_POSITIONS:,} positions, too many for minimax",
                where=where,
                remedy="use mcts, or make the game smaller with `config`, such as {board_size: 3} for hex",
            )
        sign = -1.0 if state.current_player() else 1.0
        outcomes = {int(action): value(state.child(action)) for action in state.legal_actions()}
        ranks = {action: _rank(outcome, sign) for action, outcome in outcomes.items()}
        highest = max(ranks.values())
        chosen = [action for action, rank in ranks.items() if rank == highest]
        best[position] = dict.fromkeys(chosen, 1.0 / len(chosen))
        best_outcome = outcomes[chosen[0]]
        values[position] = Value(best_outcome.returns, best_outcome.moves + 1)
        return values[position]

    value(game.new_initial_state())
    return best


def _rank(value: Value, sign: float) -> tuple[float, int]:
    worth = sign * value.returns
    return worth, -value.moves if worth > 0 else value.moves if worth < 0 else 0
