"""pass@k against enumeration and worked examples."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.data.episode import Episode
from perilune.errors import RequestError
from perilune.learn.weights import WeightedGroup
from perilune.metrics.pass_at_k import pass_at_k
from perilune.metrics.proportion import wilson_interval
from perilune.tasks.stage.outcomes import environment_figures, evaluation_summary


def answer(reward: float, name: str) -> Episode:
    none = np.zeros(1, np.int32)
    return Episode(
        name, name.partition("/")[0], name.partition("/")[0], "e", 0, (), none, none,
        np.ones(1, np.bool_), np.zeros(1, np.float32), none, "stop", reward=reward,
    )  # fmt: skip


@pytest.mark.parametrize(("k", "expected"), [(1, 0.3), (2, 0.5333), (5, 0.91667)])
def test_pass_at_k_worked_example(k: int, expected: float) -> None:
    assert pass_at_k(10, 3, k) == pytest.approx(expected, abs=5e-5)


def test_pass_at_k_draws_without_replacement() -> None:
    """Drawing with replacement underestimates: 0.832 instead of 0.917 for 3 of 10 right at k = 5."""
    with_replacement = 1 - (1 - 3 / 10) ** 5
    assert with_replacement == pytest.approx(0.832, abs=5e-4)
    groups = [[answer(float(i < 3), f"{g}/{i}") for i in range(10)] for g in range(2)]
    summary = evaluation_summary("e", groups, [], seed=0)
    mean = 1 - math.comb(7, 4) / math.comb(10, 4)
    assert summary["pass@4"]["mean"] == pytest.approx(mean)
    wilson = wilson_interval(2 * mean, 2)  # both tasks are alike, so resampled tasks show no spread
    assert summary["pass@4"]["low"] == pytest.approx(wilson.low)
    assert summary["pass@4"]["high"] == pytest.approx(wilson.high)


@given(st.data())
def test_pass_at_k_equals_enumeration_over_subsets(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 8))
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_pass_at_k_is_stable_where_binomials_overflow() -> None:
    exact = 1 - math.comb(9_000, 500) / math.comb(10_000, 500)
    assert pass_at_k(10_000, 1_000, 500) == pytest.approx(exact)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_impossible_counts(n: int, c: int, k: int) -> None:
    with pytest.raises(RequestError):
        pass_at_k(n, c, k)


def test_groups_whose_rewards_differ_by_rounding_are_dead() -> None:
    """Otherwise an evaluation would promise a gradient that no algorithm computes."""
    rounded = [[answer(0.3, f"{g}/0"), answer(0.1 + 0.2, f"{g}/1")] for g in range(3)]
    differing = [[answer(0.0, "3/0"), answer(1.0, "3/1")]]
    assert evaluation_summary("e", [*rounded, *differing], [], seed=0)["live_groups"]["mean"] == 0.25


def test_dead_groups_of_a_part_are_those_of_the_algorithm() -> None:
    groups = [
        tuple(replace(answer(float(i), f"{g}/{i}"), environment="mixture/sums") for i in range(2))
        for g in range(4)
    ]
    weighted = [WeightedGroup(group, dead=number == 0) for number, group in enumerate(groups)]
    figures = environment_figures(weighted)
    assert (figures["environment/sums/groups"], figures["environment/sums/dead_groups"]) == (4, 0.25)


def test_pass_at_zero_is_refused() -> None:
    with pytest.raises(RequestError, match="pass@0 does not exist"):
        pass_at_k(10, 3, 0)
