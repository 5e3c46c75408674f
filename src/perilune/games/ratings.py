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
from perilune.metrics.bootstrap import CONFIDENCE_LEVEL, Interval

SCALE = 400 / math.log(10)  # Elo points per nat of log odds
PRIOR = 1.0  # drawn games added to each pair that played, so an undefeated player has a finite rating
_STEPS = 50  # of Newton's method; about six suffice
_TOLERANCE = 1e-9
_LONGEST = 4.0  # maximum change of a rating in one step, nats


@dataclass(frozen=True, slots=True)
class Match:
    """Games between two players.

    Attributes:
        points: points of the first player in each game, from 0 (lost) to 1 (won).
    """

    first: str
    second: str
    points: tuple[float, ...]


def points_of(returns: Iterable[float], most: float) -> tuple[float, ...]:
    """Convert returns of a two-player game, between -most and most, to points between 0 and 1."""
    return tuple(0.5 + 0.5 * one / most if most else 0.5 for one in returns)


def ratings(
    matches: Sequence[Match],
    anchor: str,
    *,
    seed: int = 0,
    resamples: int = 400,
    level: float = CONFIDENCE_LEVEL,
) -> dict[str, Interval]:
    """The Elo rating of every player, with a percentile interval from resampling the games of each match.

    Args:
        anchor: the player whose rating is 0. All other ratings are relative to it.

    Raises:
        RequestError: if a match has no games or points outside [0, 1], or no chain of matches links a player
            to the anchor.
    """
    players = list(dict.fromkeys([anchor, *(name for one in matches for name in (one.first, one.second))]))
    _check(matches, players)
    place = {name: number for number, name in enumerate(players)}
    pairs = np.array([(place[one.first], place[one.second]) for one in matches]).reshape(-1, 2)
    games = np.array([len(one.points) for one in matches], np.float64)
    rng = np.random.default_rng(seed)
    won = np.empty((1 + resamples, len(matches)))
    for number, one in enumerate(matches):
        points = np.array(one.points)
        won[0, number] = points.sum()
        won[1:, number] = points[rng.integers(len(points), size=(resamples, len(points)))].sum(axis=1)
    found = SCALE * _fitted(pairs, won, games, len(players))
    low, high = np.quantile(found[1:] if resamples else found, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return {
        name: Interval(float(found[0, number]), float(low[number]), float(high[number]))
        for name, number in place.items()
    }


def expected(difference: float) -> float:
    """Return expected points per game of a player rated `difference` above the other."""
    return 1 / (1 + 10 ** (-difference / 400))


def _fitted(
    pairs: NDArray[np.int64], won: NDArray[np.float64], games: NDArray[np.float64], players: int
) -> NDArray[np.float64]:
    """float64[R, players]: maximum likelihood strengths in nats for each row of points; 0 for player 0."""
    first, second = pairs.T
    games, won = games + PRIOR, won + PRIOR / 2
    strength = np.zeros((len(won), players))
    each = np.arange(players)
    for _ in range(_STEPS):
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
        curve[:, each, each] += 1e-12
        move = np.clip(np.linalg.solve(curve, slope[..., None])[..., 0], -_LONGEST, _LONGEST)
        strength += move
        if np.abs(move).max() < _TOLERANCE:
            break
    return strength


def _check(matches: Sequence[Match], players: Sequence[str]) -> None:
    for one in matches:
        if not one.points or not all(0 <= point <= 1 for point in one.points):
            raise RequestError(f"a match needs games with 0 to 1 points each: {one.first} - {one.second}")
    linked = {players[0]}
    while new := {
        name
        for one in matches
        if linked & {one.first, one.second}
        for name in (one.first, one.second)
        if name not in linked
    }:
        linked |= new
    if odd := [name for name in players if name not in linked]:
        what = f"no chain of matches links {players[0]} and {odd[0]}"
        raise RequestError(what, remedy="let them play each other")
