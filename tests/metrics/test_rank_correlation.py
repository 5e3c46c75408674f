"""Spearman's correlation, its interval over problems, and its ceiling under noise."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.metrics.rank_correlation import correlation_ceiling, spearman, spearman_over_problems


def test_spearman_matches_hand_computed_values() -> None:
    assert spearman(np.array([1.0, 2, 3, 4]), np.array([10.0, 30, 20, 40])) == pytest.approx(0.8)
    # ties share the mean of their ranks: 1.5, 1.5, 3 against 1, 2, 3
    assert spearman(np.array([5.0, 5, 9]), np.array([1.0, 2, 3])) == pytest.approx(1.5 / np.sqrt(1.5 * 2))
    assert spearman(np.array([1.0, 1, 1]), np.array([1.0, 2, 3])) is None


@given(st.lists(st.integers(-20, 20), min_size=3, max_size=30, unique=True), st.integers(0, 99))
def test_spearman_depends_on_the_order_alone(values: list[int], seed: int) -> None:
    a = np.array(values, float)
    b = np.random.default_rng(seed).normal(size=len(a))
    correlation = spearman(a, b)
    assert spearman(np.exp(a / 10), b) == pytest.approx(correlation)
    assert spearman(-a, b) == pytest.approx(-correlation)
    assert spearman(a, a**3) == pytest.approx(1.0)


def test_interval_resamples_problems_and_not_pairs() -> None:
    """A hundred copies of each problem's pairs add no evidence."""
    rng = np.random.default_rng(0)
    few = [(x, x + rng.normal(size=3)) for x in rng.normal(size=(12, 3))]
    many = [(np.tile(a, 100), np.tile(b, 100)) for a, b in few]
    first, other = (spearman_over_problems(pairs, seed=1, resamples=300) for pairs in (few, many))
    assert first is not None and other is not None
    assert first.low < first.mean < first.high
    assert (other.high - other.low) == pytest.approx(first.high - first.low, rel=0.1)


def test_correlation_is_none_without_variation() -> None:
    nothing = np.zeros(0)
    assert spearman_over_problems([]) is None
    assert spearman_over_problems([(nothing, nothing), (nothing, nothing)]) is None
    assert spearman_over_problems([(np.ones(3), np.arange(3.0))]) is None


def test_ceiling_is_the_correlation_of_a_perfect_predictor() -> None:
    rng = np.random.default_rng(3)
    truth = rng.normal(size=20_000)
    halves = [truth + rng.normal(size=len(truth)) for _ in range(2)]
    reached = spearman(truth, (halves[0] + halves[1]) / 2)
    assert correlation_ceiling(*halves) == pytest.approx(reached, abs=0.02)
    assert correlation_ceiling(halves[0], -halves[0]) == 0.0
    assert correlation_ceiling(np.ones(4), np.arange(4.0)) is None
