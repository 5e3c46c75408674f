"""Paired comparisons over seeds: the t interval, its p value, Holm's correction, and the conclusion."""

import pytest

from perilune.metrics.across_seeds import (
    compare_over_seeds,
    correct_p_values,
    paired_p_value,
    t_interval,
    t_quantile,
)


@pytest.mark.parametrize(("degrees", "t"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262)])
def test_t_quantiles_match_published_tables(degrees: int, t: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(t, abs=1e-3)


def test_interval_and_p_value_agree() -> None:
    differences = [0.01, 0.03, 0.05]
    interval = t_interval(differences)
    assert interval["mean"] == pytest.approx(0.03)
    assert interval["high"] - interval["mean"] == pytest.approx(4.303 * 0.02 / 3**0.5, rel=1e-3)
    assert interval["low"] < 0 and paired_p_value(differences) > 0.05
    sure = [0.029, 0.03, 0.031]
    assert t_interval(sure)["low"] > 0 and paired_p_value(sure) < 0.01


def test_holm_corrects_p_values_stepwise() -> None:
    corrected = correct_p_values({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert corrected == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})


def test_conclusions_need_three_seeds_and_corrected_significance() -> None:
    results = compare_over_seeds({
        "clear": [0.10, 0.101, 0.102],
        "one sign": [0.01, 0.03, 0.08],
        "worse": [-0.2, -0.201, -0.202],
        "two seeds": [0.1, 0.1001],
    })  # fmt: skip
    assert {name: result.conclusion for name, result in results.items()} == {
        "clear": "higher",
        "one sign": "no difference shown",
        "worse": "lower",
        "two seeds": "too few seeds",
    }
    assert results["one sign"].describe().startswith("no difference shown (+4.0 points, ")
    assert all(result.p_corrected >= result.p for result in results.values())


def test_correction_grows_with_the_number_of_comparisons() -> None:
    alone = compare_over_seeds({"arm": [0.05, 0.062, 0.074]})["arm"]
    flat = {f"other{n}": [0.01, -0.01, 0.0] for n in range(9)}
    among = compare_over_seeds({"arm": [0.05, 0.062, 0.074], **flat})["arm"]
    assert alone.conclusion == "higher" and among.conclusion == "no difference shown"


def test_p_value_of_equal_differences_depends_on_their_number() -> None:
    assert (
        paired_p_value([0.0] * 3) == 1.0
        and paired_p_value([0.1] * 3) == 0.25
        and paired_p_value([-0.1] * 8) == 2 / 256
    )
    results = compare_over_seeds({"three": [0.1 + 0.2, 0.3, 0.3], "eight": [0.1] * 8})
    assert [result.conclusion for result in results.values()] == ["no difference shown", "higher"]
