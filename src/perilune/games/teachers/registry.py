"""Game teachers by name, and the best teacher of each game."""

from typing import Any

from perilune.errors import RequestError
from perilune.games.open_spiel_match import load_pyspiel
from perilune.games.teachers.minimax import MinimaxTeacher
from perilune.games.teachers.regret import RegretTeacher
from perilune.games.teachers.teacher import GameTeacher, GinRummyTeacher, SearchTeacher, UniformTeacher

GAME_TEACHERS = {
    "random": "random legal moves",
    "mcts": "tree search with random rollouts, for games without hidden information or simultaneous moves",
    "cfr": "CFR+, close to an equilibrium of a small game",
    "mccfr": "external-sampling MCCFR, less close to an equilibrium",
    "minimax": "perfect play of a small game without chance",
    "rules": "heuristic rules for gin rummy",
}

BEST_TEACHERS = {
    "goofspiel": "cfr",
    "leduc_poker": "cfr",
    "kuhn_poker": "cfr",
    "liars_dice": "cfr",
    "gin_rummy": "rules",
    "othello": "mcts",
    "hex": "mcts",
    "clobber": "mcts",
    "connect_four": "mcts",
    "tic_tac_toe": "minimax",
}


def make_game_teacher(name: str, game: Any, *, simulations: int = 50, where: str = "teacher") -> GameTeacher:
    """Make the teacher `name` of a pyspiel game, solving the game unless a solution is cached.

    Args:
        simulations: simulations per move of "mcts".
        where: the field that errors refer to.

    Raises:
        RequestError: if there is no such teacher, or it cannot play the game.
    """
    if name == "random":
        return UniformTeacher()
    if name == "mcts":
        _check_searchable(game, where)
        return SearchTeacher(simulations)
    if name in ("cfr", "mccfr"):
        return RegretTeacher(game, name, where)
    if name == "minimax":
        return MinimaxTeacher(game, where)
    if name == "rules":
        if game.get_type().short_name != "gin_rummy":
            raise RequestError("the teacher rules plays only gin_rummy", where=where)
        return GinRummyTeacher()
    remedy = f"one of: {', '.join(GAME_TEACHERS)}"
    raise RequestError(f"there is no game teacher '{name}'", where=where, remedy=remedy)


def _check_searchable(game: Any, where: str) -> None:
    kind, types = game.get_type(), load_pyspiel().GameType
    sees_all = kind.information == types.Information.PERFECT_INFORMATION
    if not sees_all or kind.dynamics != types.Dynamics.SEQUENTIAL:
        best = BEST_TEACHERS.get(kind.short_name, "random")
        raise RequestError(
            f"mcts cannot play '{kind.short_name}', which has hidden information or simultaneous moves",
            where=where,
            remedy=f"use {best} or random" if best != "random" else "use random",
        )
