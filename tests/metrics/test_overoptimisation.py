"""Scaling laws of over-optimization, their fit, and the watch that raises the alarm."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.errors import RequestError
from perilune.metrics.overoptimisation import (
    MIN_SLOPE_POINTS,
    GoldFit,
    OveroptimisationWatch,
    best_of_n_kl,
    fit_gold,
    fit_slope,
)


@pytest.mark.parametrize(("n", "kl"), [(1, 0.0), (2, 0.193), (16, 1.835), (256, 4.549)])
def test_kl_of_best_of_n(n: int, kl: float) -> None:
    assert best_of_n_kl(n) == pytest.approx(kl, abs=5e-4)


def test_best_of_zero_is_refused() -> None:
    with pytest.raises(RequestError, match="best-of-n needs n"):
        best_of_n_kl(0)


def test_peaks_of_worked_examples() -> None:
    best = GoldFit("best_of_n", 1.0, 0.1, 0.1, 10)
    assert (best.peak, best.gain) == pytest.approx((5.0, 2.5))
    rl = GoldFit("rl", 1.0, 0.3, 0.3, 10)
    assert (rl.peak, rl.gain) == pytest.approx((10.312, 3.0937), abs=5e-4)
    assert GoldFit("rl", 1.0, -0.1, -0.2, 10).peak == math.inf


@given(st.floats(0.2, 3), st.floats(0.05, 0.5), st.sampled_from(["best_of_n", "rl"]))
def test_fit_recovers_a_law_without_noise(alpha: float, beta: float, law: str) -> None:
    distances = [1.1 + 0.4 * i for i in range(12)]
    gains = [d * (alpha - beta * (d if law == "best_of_n" else math.log(d))) for d in distances]
    fit = fit_gold(distances, gains, law)
    assert (fit.alpha, fit.beta) == pytest.approx((alpha, beta), rel=1e-6)


def test_fit_is_weighted_least_squares_of_the_ratio() -> None:
    rng = np.random.default_rng(3)
    d = np.linspace(1.2, 6, 30)
    r = d * (1 - 0.3 * np.log(d)) + rng.normal(0, 0.2, 30)
    root = d  # square root of the weights d^2
    design = np.stack([np.ones_like(d), -np.log(d)], 1) * root[:, None]
    alpha, beta = np.linalg.lstsq(design, r / d * root, rcond=None)[0]
    fit = fit_gold(d.tolist(), r.tolist(), "rl")
    assert (fit.alpha, fit.beta) == pytest.approx((alpha, beta))
    assert fit.beta_low < fit.beta


def test_rl_law_is_fitted_to_distances_above_one() -> None:
    near = [(0.1 * i, 100.0) for i in range(1, 10)]
    far = [(1.5 + i, (1.5 + i) * (1 - 0.2 * math.log(1.5 + i))) for i in range(8)]
    distances, gains = zip(*near, *far, strict=True)
    assert fit_gold(distances, gains, "rl").alpha == pytest.approx(1.0)
    assert fit_gold([d for d, _ in near], [g for _, g in near], "rl") is None
    assert fit_gold([2.0] * 20, [1.0] * 20, "rl") is None  # no two distances


def test_slope_matches_ordinary_least_squares() -> None:
    rng = np.random.default_rng(0)
    y = 0.03 * np.arange(25) + rng.normal(0, 0.1, 25)
    slope = fit_slope(y.tolist())
    coefficients, covariance = np.polyfit(np.arange(25), y, 1, cov=True)
    assert slope.value == pytest.approx(coefficients[0])
    # polyfit divides by n - 2 as well; 2.0687 is the quantile for 23 degrees of freedom
    assert slope.value - slope.low == pytest.approx(2.068658 * math.sqrt(covariance[0, 0]))
    with pytest.raises(RequestError):
        fit_slope([1.0, 2.0])


def follow(gold: list[float], kl: list[float]) -> OveroptimisationWatch:
    watch = OveroptimisationWatch()
    for step, (score, distance) in enumerate(zip(gold, kl, strict=True), start=1):
        watch.observe(step, distance, score)
    return watch


def test_watch_raises_no_alarm_while_gold_keeps_rising() -> None:
    rng = random.Random(0)
    gold = [0.1 + 0.008 * i + rng.gauss(0, 0.02) for i in range(100)]
    watch = follow(gold, [0.05 * i for i in range(100)])
    assert watch.alarm is None
    assert watch.recommended_stop is None


@pytest.mark.parametrize("seed", range(3))
def test_watch_recommends_a_stop_near_the_gold_peak(seed: int) -> None:
    rng = random.Random(seed)
    distances = [0.06 * i for i in range(1, 150)]
    law = [d * (1.0 - 0.55 * math.log(d)) for d in distances]
    watch = follow([0.1 + 0.2 * r + rng.gauss(0, 0.02) for r in law], [d * d for d in distances])
    top = max(range(len(law)), key=lambda i: law[i]) + 1
    assert watch.recommended_stop is not None
    assert watch.recommended_stop < top + 20
    end = law[watch.recommended_stop - 1]
    assert end > 0.8 * law[top - 1]
    assert watch.alarm is not None


def test_watch_raises_no_alarm_before_gold_has_risen() -> None:
    rng = random.Random(1)
    watch = follow([0.3 + rng.gauss(0, 0.05) for _ in range(19)], [0.01] * 19)
    assert watch.alarm is None


def test_watch_reports_the_figures_of_each_step() -> None:
    watch = OveroptimisationWatch(window=3)
    assert MIN_SLOPE_POINTS > 3  # so that the window decides
    assert watch.observe(1, 0.04, 0.1) == {
        "distance": pytest.approx(0.2), "overoptimisation_alarm": 0.0, "stop_recommended": 0.0,
    }  # fmt: skip
    watch.observe(2, 0.09, 0.2)
    figures = watch.observe(3, -1e-9, 0.3)  # an estimate of a KL may be below zero
    assert figures["distance"] == 0.0
    assert figures["gold_slope"] == pytest.approx(0.1)
    figures = watch.observe(4, 0.1, 0.4)
    assert (figures["gold_slope_low"], watch.alarm) == (pytest.approx(0.1), None)
    watch.observe(5, 0.1, 0.5)  # gold has risen for three observations
    figures = watch.observe(6, 0.1, 0.1)
    assert figures["overoptimisation_alarm"] == figures["stop_recommended"] == 1.0
    assert (watch.alarm, watch.recommended_stop) == (6, 6)


def test_watch_ignores_random_fluctuation() -> None:
    watch = OveroptimisationWatch(window=3)
    for step, gold in enumerate([0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.1], start=1):
        watch.observe(step, 0.01, gold)
    assert watch.alarm is None
