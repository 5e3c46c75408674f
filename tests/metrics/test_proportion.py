"""Wilson's interval against published figures and at 0 and 1."""

import pytest

from perilune.errors import RequestError
from perilune.metrics.bootstrap import bootstrap_problems, paired_difference
from perilune.metrics.proportion import pass_rate_change, pass_rate_interval, wilson_interval


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (29, 29, 0.8830, 1.0)],
)
def test_wilson_matches_figures_of_newcombe(successes: int, trials: int, low: float, high: float) -> None:
    """Newcombe, "Two-sided confidence intervals for the single proportion" (1998), table I, method 3."""
    interval = wilson_interval(successes, trials)
    assert interval.mean == successes / trials
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)


def test_wilson_refuses_zero_trials() -> None:
    with pytest.raises(RequestError, match="at least one trial"):
        wilson_interval(0, 0)


def test_equal_pass_rates_use_wilson() -> None:
    assert pass_rate_interval([0.0] * 20) == wilson_interval(0, 20)
    assert pass_rate_interval([1.0] * 29) == wilson_interval(29, 29)
    assert pass_rate_interval([0.5] * 10) == wilson_interval(5, 10)
    assert pass_rate_interval([0.375]) == wilson_interval(0.375, 1)  # one problem says little
    assert pass_rate_interval([-1.0, -1.0]) == (-1.0, -1.0, -1.0)  # equal rewards that are no pass rates
    mixed = [0.0, 0.25, 1.0, 0.5] * 5
    assert pass_rate_interval(mixed, seed=3) == bootstrap_problems(mixed, seed=3)


@pytest.mark.parametrize(
    ("before", "after", "mean", "low", "high"),
    [(0.0, 0.0, 0.0, -0.1611, 0.1611), (1.0, 1.0, 0.0, -0.1611, 0.1611), (0.0, 1.0, 1.0, 0.6777, 1.0)],
)
def test_equal_changes_have_an_interval(
    before: float, after: float, mean: float, low: float, high: float
) -> None:
    sides = ({str(task): rate for task in range(20)} for rate in (before, after))
    assert pass_rate_change(*sides) == pytest.approx((mean, low, high), abs=5e-5)


def test_unequal_changes_use_the_paired_bootstrap() -> None:
    before = {"a": 0.25, "b": 0.5, "c": 0.0}
    after = {"a": 0.5, "b": 0.5, "c": 1.0}
    assert pass_rate_change(before, after, seed=3) == paired_difference(before, after, seed=3)
