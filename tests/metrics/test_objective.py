"""Implicit objectives against closed forms and a simulated gradient."""

import math

import numpy as np
import pytest

from perilune.errors import RequestError
from perilune.learn.algorithms import RL_ALGORITHMS, algorithm
from perilune.learn.objective import live_group_probability, objective_curve


def test_dr_grpo_optimizes_the_pass_rate() -> None:
    for _, w in objective_curve("dr_grpo", 8):
        assert w == pytest.approx(1 - 1 / 8)


def test_grpo_in_large_groups_optimizes_the_arcsine() -> None:
    for p, w in objective_curve("grpo", 250, points=9):
        assert w == pytest.approx(1 / math.sqrt(p * (1 - p)), rel=0.03)


def test_grpo_in_small_groups_agrees_with_a_simulated_gradient() -> None:
    """A one-parameter Bernoulli policy: grad log pi is 1 / p or -1 / (1 - p), so grad p is 1."""
    rng, K, p = np.random.default_rng(0), 4, 0.25
    r = (rng.random((200_000, K)) < p).astype(float)
    centred = r - r.mean(1, keepdims=True)
    std = r.std(1, ddof=1, keepdims=True)
    advantages = np.where(std > 0, centred / (std + 1e-4), 0)
    gradient = (advantages * np.where(r > 0, 1 / p, -1 / (1 - p))).mean()
    curve = dict(objective_curve("grpo", K, points=3))
    assert curve[0.25] == pytest.approx(gradient, rel=0.01)


@pytest.mark.parametrize("k", [1, 3])
def test_pkpo_optimizes_pass_at_k(k: int) -> None:
    for p, w in objective_curve(algorithm("pkpo", k=k), 6, points=9):
        assert w == pytest.approx(k * (1 - p) ** (k - 1))


def test_maxrl_in_large_groups_optimizes_the_log_pass_rate() -> None:
    for p, w in objective_curve("maxrl", 120, points=9):
        assert w == pytest.approx(1 / p, rel=0.05)


def test_rloo_is_unbiased_for_the_pass_rate() -> None:
    for _, w in objective_curve("rloo", 4, points=9):
        assert w == pytest.approx(1)


@pytest.mark.parametrize("name", [name for name, kind in RL_ALGORITHMS.items() if kind.compares == "group"])
def test_every_group_algorithm_has_an_objective(name: str) -> None:
    assert all(w >= 0 for _, w in objective_curve(name, 6, points=9))


def test_algorithms_without_group_comparison_have_no_objective() -> None:
    for name in ("sft", "ppo", "reinforce_pp"):
        with pytest.raises(RequestError, match="no implicit objective"):
            objective_curve(name, 8)
    with pytest.raises(RequestError, match="group of 1"):
        objective_curve("grpo", 1)


@pytest.mark.parametrize(
    ("K", "row"), [(8, [0.077, 0.337, 0.570, 0.942, 0.992]), (16, [0.149, 0.560, 0.815, 0.997, 1.0])]
)
def test_live_group_probability(K: int, row: list[float]) -> None:
    probabilities = [live_group_probability(p, K) for p in (0.01, 0.05, 0.1, 0.3, 0.5)]
    assert probabilities == pytest.approx(row, abs=6e-4)
