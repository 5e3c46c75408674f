"""Teachers of games by name, and which one is a game's own."""

from __future__ import annotations

from typing import Any

from perilune.errors import RequestError
from perilune.games.open_spiel_match import pyspiel
from perilune.games.teachers.gin import GinRummyTeacher
from perilune.games.teachers.minimax import MinimaxTeacher
from perilune.games.teachers.regret import RegretTeacher
from perilune.games.teachers.search import SearchTeacher
from perilune.games.teachers.teacher import GameTeacher, UniformTeacher

GAME_TEACHERS = {
    "random": "any legal move",
    "mcts": "tree search with random rollouts, for games without hidden cards or simultaneous moves",
    "cfr": "CFR+, nearly an equilibrium of a small game",
    "mccfr": "external-sampling MCCFR, further from an equilibrium",
    "minimax": "perfect play of a small game without chance",
    "rules": "rules of thumb for gin rummy",
}

BEST = {
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
    """The teacher `name` of a game of pyspiel; one that solves it does so now, unless its solution is kept.

    Args:
        simulations: of a move of "mcts".
        where: what an error names as its place.

    Raises:
        RequestError: when there is no such teacher, or it cannot play the game.
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
            raise RequestError("the rules of thumb are those of gin_rummy", where=where)
        return GinRummyTeacher()
    raise RequestError(f"no teacher of games is called '{name}'", where=where, remedy=_ways())


def _check_searchable(game: Any, where: str) -> None:
    kind, types = game.get_type(), pyspiel().GameType
    sees_all = kind.information == types.Information.PERFECT_INFORMATION
    if not sees_all or kind.dynamics != types.Dynamics.SEQUENTIAL:
        own = BEST.get(kind.short_name, "random")
        raise RequestError(
            f"the search sees all cards, and moves one at a time: not for '{kind.short_name}'",
            where=where,
            remedy=f"{own}, or random" if own != "random" else own,
        )


def _ways() -> str:
    return f"one of: {', '.join(GAME_TEACHERS)}"
