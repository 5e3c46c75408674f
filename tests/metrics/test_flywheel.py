"""Growth of the odds by rounds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.errors import RequestError
from perilune.metrics.flywheel import after_rounds, measured_gain, rounds_to


def test_worked_examples() -> None:
    assert after_rounds(0.2, 2, 3) == pytest.approx(0.6667, abs=5e-5)
    assert after_rounds(0.2, 0.9 / 0.3) == pytest.approx(0.42857, abs=5e-6)


@given(st.floats(0.05, 0.5), st.floats(1.1, 4))
def test_rounds_and_gain_are_found_again(p: float, gain: float) -> None:
    rates = [after_rounds(p, gain, t) for t in range(4)]
    assert measured_gain(rates) == pytest.approx(gain)
    assert rounds_to(p, rates[3], gain) == pytest.approx(3)


def test_a_stall_never_arrives() -> None:
    assert measured_gain([0.3, 0.3]) == 1.0
    assert rounds_to(0.3, 0.6, 1.0) == math.inf
    with pytest.raises(RequestError, match="at least two"):
        measured_gain([0.3, 1.0])
