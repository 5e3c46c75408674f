"""Evaluates players: single moves against the exact solver, and matches."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perilune.engine.random import uniforms
from perilune.games.connect_four.board import (
    Boards,
    concatenate,
    count_plies,
    empty_boards,
    has_four,
    is_full,
    play,
)
from perilune.games.connect_four.players import Player, one_ply, random_player
from perilune.games.connect_four.solver import FULL_COLUMN, Scores, Solver
from perilune.metrics.proportion import wilson_interval

PLY_BUCKETS = ((8, 11), (12, 15), (16, 19), (20, 23), (24, 27), (28, 31), (32, 40))  # for reports
_MATCH_STREAM, _POSITION_STREAM = 1 << 30, 1 << 31  # streams of random numbers that training does not use


@dataclass(frozen=True, slots=True, eq=False)
class Exam:
    """Positions with the exact score of every move.

    Attributes:
        boards: N positions of unfinished games.
        scores: int8[N, 7], the score of each column; FULL_COLUMN if it is full.
    """

    boards: Boards
    scores: Scores


def make_exam(solver: Solver, per_ply: int, first_ply: int, seed: int) -> Exam:
    """Solve `per_ply` positions of each ply from `first_ply` to 40.

    From ply 8 on, the solver takes well under a second per position. Half of the positions are from random
    games, half from games in which nobody misses an immediate win or block.
    """
    plies, count = range(first_ply, 41), -(-per_ply // 2)
    players = (random_player, one_ply)
    boards = concatenate(*(sample_positions(player, n, count, seed) for player in players for n in plies))
    return Exam(boards, solver.column_scores(boards))


def sample_positions(player: Player, ply: int, count: int, seed: int) -> Boards:
    """Return `count` positions of unfinished games after `ply` moves of `player`."""
    batches: list[Boards] = []
    lane = 0
    while sum(map(len, batches)) < count:
        boards = empty_boards(16 * count)
        for _ in range(ply):
            lane += 1
            boards = play(boards, player(boards, _draw(seed, _POSITION_STREAM, ply, lane, len(boards))))
            boards = boards[~has_four(boards.other)]
        batches.append(boards)
    return concatenate(*batches)[:count]


def _draw(seed: int, purpose: int, lane: int, turn: int, count: int) -> NDArray[np.float64]:
    keys = np.zeros((1, 4), np.uint64)
    keys[0] = seed, purpose, lane, turn
    return np.asarray(uniforms(keys, np.arange(count)[None])[0])


def grade_player(exam: Exam, player: Player, seed: int = 0) -> dict[str, Any]:
    """Return how often a player's move is a best move, and how often it loses a win or a draw, by ply.

    Positions in which all moves have the same score are left out.
    """
    is_decisive = np.where(exam.scores == FULL_COLUMN, 99, exam.scores).min(axis=1) < exam.scores.max(axis=1)
    boards, scores = exam.boards[is_decisive], exam.scores[is_decisive]
    columns = player(boards, _draw(seed, _POSITION_STREAM, 0, 0, len(boards)))
    chosen, best = scores[np.arange(len(scores)), columns], scores.max(axis=1)
    optimal, blunder = chosen == best, np.sign(chosen) < np.sign(best)
    moved = count_plies(boards)
    buckets = {f"{first} to {last}": (first <= moved) & (moved <= last) for first, last in PLY_BUCKETS}
    return {
        "positions": len(boards),
        **_to_shares(optimal, blunder),
        "lost_score": float((best - chosen).mean()),
        "by_ply": [
            {"plies": name, "positions": int(mask.sum()), **_to_shares(optimal[mask], blunder[mask])}
            for name, mask in buckets.items()
            if mask.any()
        ],
    }


def _to_shares(optimal: NDArray[np.bool_], blunder: NDArray[np.bool_]) -> dict[str, Any]:
    return {
        "optimal": wilson_interval(int(optimal.sum()), len(optimal))._asdict(),
        "blunders": wilson_interval(int(blunder.sum()), len(blunder))._asdict(),
    }


@dataclass(frozen=True, slots=True)
class Match:
    """Games between two players, from the first player's side.

    Attributes:
        results: int8[N], 1 won, 0 drawn, -1 lost.
        began: bool[N], whether the first player had the first move.
    """

    results: NDArray[np.int8]
    began: NDArray[np.bool_]

    def figures(self) -> dict[str, Any]:
        """Return games won, drawn and lost, and points per game: of all games, beginning, and replying."""
        report: dict[str, Any] = {"games": len(self.results)}
        for name, chosen in (("", slice(None)), (" beginning", self.began), (" replying", ~self.began)):
            results = self.results[chosen]
            report["points" + name] = wilson_interval(float((results + 1).sum() / 2), len(results))._asdict()
        outcomes = {"won": 1, "drawn": 0, "lost": -1}
        return report | {name: int((self.results == value).sum()) for name, value in outcomes.items()}


def play_match(first: Player, second: Player, openings: Boards, seed: int = 0) -> Match:
    """Play every opening twice, once with each player beginning."""
    boards = concatenate(openings, openings)
    count = len(boards)
    began = np.arange(count) < len(openings)
    results = np.zeros(count, np.int8)
    playing = np.arange(count)
    own, stones = boards.own.copy(), boards.stones.copy()
    turn = 0
    while len(playing):
        for player, is_first in ((first, True), (second, False)):
            turn += 1
            uniform = _draw(seed, _MATCH_STREAM, 0, turn, count)
            current = Boards(own[playing], stones[playing])
            to_move = (began[playing] == (count_plies(current) % 2 == 0)) == is_first
            moving = playing[to_move]
            if not len(moving):
                continue
            after = play(current[to_move], player(current[to_move], uniform[moving]))
            own[moving], stones[moving] = after.own, after.stones
            won = has_four(after.other)
            results[moving[won]] = 1 if is_first else -1
            playing = np.setdiff1d(playing, moving[won | is_full(after)])
    return Match(results, began)


def make_openings(length: int, count: int, seed: int) -> Boards:
    """Return positions after `length` random moves, without games that are over."""
    return empty_boards(count) if length == 0 else sample_positions(random_player, length, count, seed)


def make_openings_against(name: str, solver: Solver, count: int, first_ply: int, seed: int) -> Boards:
    """Return positions after two random moves; against "perfect", drawn positions after `first_ply` moves."""
    if name != "perfect":
        return make_openings(2, count, seed)
    batches: list[Boards] = []
    while sum(map(len, batches)) < count:
        candidates = make_openings(first_ply, count, seed + len(batches))
        batches.append(candidates[solver.scores(candidates, -1, 1) == 0])
    return concatenate(*batches)[:count]
