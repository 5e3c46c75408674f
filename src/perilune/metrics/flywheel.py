"""Rounds of keeping what a verifier likes and learning it: how fast the pass rate can grow.

A round that keeps right answers with probability a1 and wrong ones with a0, and is then fitted perfectly,
multiplies the odds of the pass rate by g = a1 / a0; exponentiated-gradient reinforcement learning does with
g = exp(eta). So logit p grows by ln g a round. A perfect verifier has g infinite: what is gained is then
limited by the fit, and what is measured says by how much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from perilune.errors import RequestError


def after_rounds(p: float, gain: float, rounds: float = 1.0) -> float:
    """Pass rate after `rounds` rounds that each multiply the odds by `gain`."""
    odds = math.pow(gain, rounds) * p / (1 - p)
    return odds / (1 + odds)


def rounds_to(p: float, goal: float, gain: float) -> float:
    """Rounds from pass rate `p` to `goal`; infinite when a round gains nothing."""
    return (_logit(goal) - _logit(p)) / math.log(gain) if gain > 1 else math.inf


def measured_gain(rates: Sequence[float]) -> float:
    """g of a series of pass rates, one a round: exp of the slope of logit p. 1 is a stall.

    Raises:
        RequestError: for fewer than two rates, or one that is 0 or 1.
    """
    if len(rates) < 2 or not all(0 < rate < 1 for rate in rates):
        raise RequestError("a gain needs at least two pass rates, each above 0 and below 1")
    middle = (len(rates) - 1) / 2
    spread = math.fsum((i - middle) ** 2 for i in range(len(rates)))
    return math.exp(math.fsum((i - middle) * _logit(rate) for i, rate in enumerate(rates)) / spread)


def _logit(p: float) -> float:
    return math.log(p / (1 - p))
