"""Growth of the odds of success over flywheel rounds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.errors import RequestError
from perilune.metrics.flywheel import gain_interval, likelihood_ratio, measured_gain, rounds_to


def after_rounds(p: float, gain: float, rounds: float) -> float:
    """Pass rate after `rounds` rounds that each multiply the odds by `gain`."""
    odds = math.pow(gain, rounds) * p / (1 - p)
    return odds / (1 + odds)


@given(st.floats(0.05, 0.5), st.floats(1.1, 4))
def test_gain_and_rounds_are_recovered_from_pass_rates(p: float, gain: float) -> None:
    rates = [after_rounds(p, gain, t) for t in range(4)]
    assert measured_gain(rates) == pytest.approx(gain)
    assert rounds_to(p, rates[3], gain) == pytest.approx(3)


def test_rounds_to_is_infinite_without_gain() -> None:
    assert measured_gain([0.3, 0.3]) == 1.0
    assert rounds_to(0.3, 0.6, 1.0) == math.inf
    with pytest.raises(RequestError, match="at least two"):
        measured_gain([0.3, 1.0])


def rates(share: float, tasks: int = 400) -> dict[str, float]:
    """Pass rates of `tasks` tasks, of which `share` are solved."""
    return {str(task): float((task * 7919) % tasks < share * tasks) for task in range(tasks)}


def test_gain_interval_contains_the_gain_and_narrows_with_tasks() -> None:
    shares = [after_rounds(0.1, 2, t) for t in range(4)]
    few, many = (gain_interval([rates(share, tasks) for share in shares]) for tasks in (100, 1000))
    assert few.low < 2 < few.high and many.mean == pytest.approx(2, abs=0.05)
    assert many.high - many.low < few.high - few.low


def test_gain_interval_of_equal_rounds_is_exactly_one() -> None:
    same = rates(0.3)
    assert gain_interval([same, same]) == (1.0, 1.0, 1.0)
    assert gain_interval([rates(0.0), rates(1.0)]).low > 100  # finite, although both logits are infinite


def test_gain_interval_refuses_different_tasks_and_single_rounds() -> None:
    with pytest.raises(RequestError, match="same tasks"):
        gain_interval([rates(0.3, 10), rates(0.3, 11)])
    with pytest.raises(RequestError, match="two rounds"):
        gain_interval([rates(0.3)])


def test_likelihood_ratio_of_a_verifier() -> None:
    ratio = likelihood_ratio(900, 1000, 300, 1000)
    assert ratio.mean == pytest.approx(3, rel=0.01) and ratio.low < 3 < ratio.high
    assert likelihood_ratio(90, 100, 30, 100).low < ratio.low
    perfect = likelihood_ratio(50, 50, 0, 200)
    assert math.isfinite(perfect.high) and perfect.low > 10
    with pytest.raises(RequestError, match="right and wrong"):
        likelihood_ratio(5, 5, 0, 0)
