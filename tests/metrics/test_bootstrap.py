"""Bootstrap intervals: determinism, width, coverage, and paired differences."""

import math
import tracemalloc

import numpy as np
import pytest

from perilune.errors import RequestError
from perilune.metrics.bootstrap import bootstrap_problems, bootstrap_ratio, paired_difference


def test_interval_width_matches_the_standard_error() -> None:
    values = np.random.default_rng(1).random(400)
    interval = bootstrap_problems(values)
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert interval.mean == pytest.approx(values.mean())
    assert interval.high - interval.mean == pytest.approx(half, rel=0.05)
    assert interval.mean - interval.low == pytest.approx(half, rel=0.05)


def test_interval_has_its_nominal_coverage() -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for seed in range(200):
        interval = bootstrap_problems((rng.random(60) < 0.4).astype(float), seed=seed, resamples=1000)
        hits += interval.low <= 0.4 <= interval.high
    assert 180 <= hits <= 199


def test_interval_depends_on_the_seed_alone() -> None:
    values = np.random.default_rng(3).random(50)
    assert bootstrap_problems(values, seed=4) == bootstrap_problems(values, seed=4)
    assert bootstrap_problems(values, seed=4) != bootstrap_problems(values, seed=5)


def test_chunked_resampling_gives_the_same_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(3).random(50)
    whole = bootstrap_problems(values, resamples=100)
    monkeypatch.setattr("perilune.metrics.bootstrap._CHUNK_INDICES", 350)
    assert bootstrap_problems(values, resamples=100) == whole


def test_ratio_of_many_problems_is_resampled_in_parts() -> None:
    wholes = np.full(20_000, 4.0)
    parts = np.random.default_rng(3).integers(2, size=len(wholes))
    tracemalloc.start()
    ratio = bootstrap_ratio(parts.tolist(), wholes.tolist())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300e6  # all indices at once take 1.6 GB
    half = 1.96 * parts.std() / np.sqrt(len(parts)) / 4
    assert ratio.high - ratio.mean == pytest.approx(half, rel=0.05)


@pytest.mark.parametrize(("parts", "wholes"), [([math.nan], [1]), ([1], [math.inf]), ([1], [0]), ([], [])])
def test_ratio_refuses_values_without_one(parts: list[float], wholes: list[float]) -> None:
    with pytest.raises(RequestError, match="a ratio needs problems"):
        bootstrap_ratio(parts, wholes)


def test_interval_of_a_single_value_has_zero_width() -> None:
    assert bootstrap_problems([0.5]) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("values", [[], [0.1, float("nan")], [float("inf")]])
def test_empty_or_non_finite_values_are_refused(values: list[float]) -> None:
    with pytest.raises(RequestError):
        bootstrap_problems(values)


def test_paired_difference_removes_variance_between_problems() -> None:
    hardness = np.random.default_rng(5).random(100)
    before = {f"t{i}": h for i, h in enumerate(hardness)}
    after = {f"t{i}": h + 0.05 for i, h in reversed(list(enumerate(hardness)))}
    difference = paired_difference(before, after)
    assert difference == pytest.approx((0.05, 0.05, 0.05))
    assert bootstrap_problems(list(after.values())).low < bootstrap_problems(hardness).high


def test_paired_difference_names_the_unmatched_task() -> None:
    with pytest.raises(RequestError, match="task b is only in the second"):
        paired_difference({"a": 1.0}, {"a": 1.0, "b": 0.0})
