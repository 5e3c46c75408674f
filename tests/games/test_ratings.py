"""Ratings: order, draws, the anchor, coverage of intervals, and invalid matches."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.errors import RequestError
from perilune.games.ratings import (
    ELO_PER_NAT,
    PRIOR_GAMES,
    Match,
    compute_ratings,
    expected_points,
    returns_to_points,
)


def games(won: int, drawn: int, lost: int) -> tuple[float, ...]:
    return (1.0,) * won + (0.5,) * drawn + (0.0,) * lost


def test_rating_difference_of_two_players_predicts_their_points() -> None:
    ratings = compute_ratings([Match("b", "random", games(30, 4, 6))], "random")
    assert ratings["random"] == (0.0, 0.0, 0.0)
    share = (32 + PRIOR_GAMES / 2) / (40 + PRIOR_GAMES)
    assert ratings["b"].mean == pytest.approx(400 * math.log10(share / (1 - share)))
    assert expected_points(ratings["b"].mean) == pytest.approx(share)
    assert ratings["b"].low < ratings["b"].mean < ratings["b"].high


def test_two_draws_count_as_one_win_and_one_loss() -> None:
    drawn = compute_ratings([Match("a", "b", games(0, 20, 0))], "b")["a"]
    assert drawn.mean == pytest.approx(0, abs=1e-9) and drawn.high == pytest.approx(0, abs=1e-9)
    mixed = compute_ratings([Match("a", "b", games(6, 4, 2))], "b")["a"]
    split = compute_ratings([Match("a", "b", games(8, 0, 4))], "b")["a"]
    assert mixed.mean == pytest.approx(split.mean)
    assert mixed.high - mixed.low < split.high - split.low  # draws carry more information


def test_unbeaten_player_has_a_finite_rating_that_grows_with_games() -> None:
    few, many = (compute_ratings([Match("a", "b", games(n, 0, 0))], "b")["a"].mean for n in (4, 40))
    assert 0 < few < many < 1000


def test_matches_of_a_pair_count_as_one_match() -> None:
    whole = compute_ratings([Match("a", "b", games(6, 1, 1))], "b", resamples=0)
    parts = [
        Match("a", "b", games(3, 0, 0)),
        Match("b", "a", games(1, 1, 0)),
        Match("a", "b", games(3, 0, 0)),
    ]
    assert compute_ratings(parts, "b", resamples=0)["a"].mean == pytest.approx(whole["a"].mean)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-400, 400), min_size=2, max_size=5),
    st.integers(200, 400),
)
def test_ratings_recover_strengths_from_expected_points(truth: list[float], count: int) -> None:
    """With the expected points and the prior removed, the fit equals the true strengths."""
    names = [f"p{n}" for n in range(len(truth))]
    matches = []
    for a in range(len(truth)):
        for b in range(a + 1, len(truth)):
            share = expected_points(truth[a] - truth[b])
            points = (share * (count + PRIOR_GAMES) - PRIOR_GAMES / 2) / count
            if not 0 <= points <= 1:
                return
            matches.append(Match(names[a], names[b], (points,) * count))
    ratings = compute_ratings(matches, names[0], resamples=0)
    for name, value in zip(names, truth, strict=True):
        assert ratings[name].mean == pytest.approx(value - truth[0], abs=1e-3)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))
def test_ratings_are_independent_of_sides_and_anchor(won: int, drawn: int, lost: int) -> None:
    if not won + drawn + lost:
        return
    third = Match("c", "a", games(3, 2, 1))
    plain = compute_ratings([Match("a", "b", games(won, drawn, lost)), third], "b", resamples=0)
    other = compute_ratings([Match("b", "a", games(lost, drawn, won)), third], "b", resamples=0)
    shifted = compute_ratings([Match("a", "b", games(won, drawn, lost)), third], "a", resamples=0)
    for name in "abc":
        assert plain[name].mean == pytest.approx(other[name].mean, abs=1e-6)
        assert plain[name].mean - plain["a"].mean == pytest.approx(shifted[name].mean, abs=1e-6)


def test_rating_differences_add_up_along_a_chain() -> None:
    ratings = compute_ratings([Match("c", "b", games(30, 0, 10)), Match("b", "a", games(30, 0, 10))], "a")
    assert ratings["c"].mean == pytest.approx(2 * ratings["b"].mean)
    assert ratings["c"].high - ratings["c"].low > ratings["b"].high - ratings["b"].low


def test_intervals_have_their_nominal_coverage() -> None:
    rng, truth = np.random.default_rng(0), 150.0
    covered = 0
    for seed in range(100):
        wins = rng.random(120) < expected_points(truth)
        found = compute_ratings([Match("a", "b", tuple(wins.astype(float)))], "b", seed=seed, resamples=200)[
            "a"
        ]
        covered += found.low <= truth <= found.high
    assert 88 <= covered <= 99


def test_returns_become_points() -> None:
    assert returns_to_points((2.0, 1.0, 0.0, -1.0, -2.0), 2.0) == (1.0, 0.75, 0.5, 0.25, 0.0)
    assert returns_to_points((0.0, 0.0), 0.0) == (0.5, 0.5)
    assert pytest.approx(400) == ELO_PER_NAT * math.log(10)


@pytest.mark.parametrize(
    ("matches", "message"),
    [
        ([Match("a", "b", ())], "needs games"),
        ([Match("a", "b", (1.5,))], "0 to 1 points"),
        ([Match("a", "b", (1.0,)), Match("c", "d", (1.0,))], "links a and c"),
    ],
)
def test_ratings_refuse_invalid_matches(matches: list[Match], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        compute_ratings(matches, "a")
