"""Elo ratings from a table of matches, by the Bradley-Terry model, with bootstrap intervals.

A player rated 400 above another is expected to score 10 points for each of the other's. A win is 1 point and
a draw half a point (Elo 1978). Card games use the share of the maximum return as points. Bradley and Terry
1952, Biometrika 39; the maximum likelihood estimate is found by Newton's method, as in Hunter 2004.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perilune.errors import RequestError
from perilune.metrics.across_seeds import CONFIDENCE_LEVEL
from perilune.metrics.bootstrap import Interval

ELO_PER_NAT = 400 / math.log(10)  # Elo points per nat of log odds
PRIOR_GAMES = 1.0  # drawn games added to each pair that played, so an undefeated player has a finite rating
_MAX_NEWTON_STEPS = 50  # about six suffice
_TOLERANCE = 1e-9  # nats
_MAX_STEP_NATS = 4.0  # maximum change of a rating in one step


@dataclass(frozen=True, slots=True)
class Match:
    """Games between two players.

    Attributes:
        points: points of the first player in each game, from 0 (lost) to 1 (won).
    """

    first: str
    second: str
    points: tuple[float, ...]


def returns_to_points(returns: Iterable[float], max_return: float) -> tuple[float, ...]:
    """Convert returns of a two-player game, from -`max_return` to `max_return`, to points from 0 to 1."""
    return tuple(0.5 + 0.5 * value / max_return if max_return else 0.5 for value in returns)


def compute_ratings(
    matches: Sequence[Match], anchor: str, *, seed: int = 0, resamples: int = 400
) -> dict[str, Interval]:
    """Compute Elo ratings, with percentile intervals from resampling the games of each match.

    Args:
        anchor: the player whose rating is 0. All other ratings are relative to it.

    Raises:
        RequestError: if a match has no games or points outside [0, 1], or no chain of matches links a player
            to the anchor.
    """
    players = list(
        dict.fromkeys([anchor, *(name for match in matches for name in (match.first, match.second))])
    )
    _check_matches(matches, players)
    index_of = {name: number for number, name in enumerate(players)}
    pairs = np.array([(index_of[match.first], index_of[match.second]) for match in matches]).reshape(-1, 2)
    games = np.array([len(match.points) for match in matches], np.float64)
    rng = np.random.default_rng(seed)
    won = np.empty((1 + resamples, len(matches)))
    for number, match in enumerate(matches):
        points = np.array(match.points)
        won[0, number] = points.sum()
        won[1:, number] = points[rng.integers(len(points), size=(resamples, len(points)))].sum(axis=1)
    elo = ELO_PER_NAT * _fit_strengths(pairs, won, games, len(players))
    low, high = np.quantile(
        elo[1:] if resamples else elo, [(1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2], axis=0
    )
    return {
        name: Interval(float(elo[0, number]), float(low[number]), float(high[number]))
        for name, number in index_of.items()
    }


def expected_points(difference: float) -> float:
    """Return the expected points per game of a player rated `difference` above the other."""
    return 1 / (1 + 10 ** (-difference / 400))


def _fit_strengths(
    pairs: NDArray[np.int64], won: NDArray[np.float64], games: NDArray[np.float64], players: int
) -> NDArray[np.float64]:
    """Return maximum likelihood strengths, float64[R, players] in nats; 0 for player 0.

    `pairs` is int64[matches, 2], `won` (points) float64[R, matches], `games` float64[matches].
    """
    first, second = pairs.T
    _, pair, entries = np.unique(np.sort(pairs), axis=0, return_inverse=True, return_counts=True)
    prior = PRIOR_GAMES / entries[pair.reshape(-1)]  # of each entry, in any order of its players
    games, won = games + prior, won + prior / 2
    strength = np.zeros((len(won), players))
    diagonal = np.arange(players)
    for _ in range(_MAX_NEWTON_STEPS):
        p = 1 / (1 + np.exp(strength[:, second] - strength[:, first]))
        surplus, weight = won - games * p, games * p * (1 - p)
        slope = np.zeros_like(strength)
        curve = np.zeros((len(won), players, players))
        for number, (a, b) in enumerate(pairs.tolist()):
            slope[:, a] += surplus[:, number]
            slope[:, b] -= surplus[:, number]
            for i, j, sign in ((a, a, 1), (b, b, 1), (a, b, -1), (b, a, -1)):
                curve[:, i, j] += sign * weight[:, number]
        curve[:, 0, :], curve[:, :, 0], slope[:, 0] = 0, 0, 0
        curve[:, 0, 0] = 1
        curve[:, diagonal, diagonal] += 1e-12
        move = np.clip(np.linalg.solve(curve, slope[..., None])[..., 0], -_MAX_STEP_NATS, _MAX_STEP_NATS)
        strength += move
        if np.abs(move).max() < _TOLERANCE:
            break
    return strength


def _check_matches(matches: Sequence[Match], players: Sequence[str]) -> None:
    for match in matches:
        if not match.points or not all(0 <= point <= 1 for point in match.points):
            raise RequestError(f"a match needs games with 0 to 1 points each: {match.first} - {match.second}")
    linked = {players[0]}
    while new := {
        name
        for match in matches
        if linked & {match.first, match.second}
        for name in (match.first, match.second)
        if name not in linked
    }:
        linked |= new
    if unlinked := [name for name in players if name not in linked]:
        what = f"no chain of matches links {players[0]} and {unlinked[0]}"
        raise RequestError(what, remedy="let them play each other")
