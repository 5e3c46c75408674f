"""Advantages and aggregation against worked examples; rejection of invalid rewards."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learning_cases import episode, weighted_groups

from perilune.errors import RequestError, WorkFailedError
from perilune.learn.advantages import DEAD_STD, centred, is_dead, standardized
from perilune.learn.algorithms import ALGORITHMS, algorithm
from perilune.learn.weights import Aggregation, aggregate

COMPARING = ("grpo", "dr_grpo")


def test_group_advantages_worked_example() -> None:
    r = np.array([1.0, 0, 0, 0])
    assert standardized(r, epsilon=0) == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert centred(r) == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_standardized_advantages_are_zero_for_negligible_reward_spread() -> None:
    r = np.array([1.0] * 7 + [0.999])
    std = r.std(ddof=1)
    assert (r[-1] - r.mean()) / (std + 1e-6) == pytest.approx(-2.47, abs=5e-3)  # without the threshold
    assert (r[-1] - r.mean()) / (std + 1e-4) == pytest.approx(-1.93, abs=5e-3)
    assert standardized(r).tolist() == [0.0] * 8


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12))
def test_advantages_are_finite_and_sum_to_zero(values: list[float]) -> None:
    r = np.array(values)
    for advantages in (centred(r), standardized(r)):
        assert np.isfinite(advantages).all()
        assert abs(advantages.sum()) < 1e-6
        ordered = advantages[np.argsort(r, kind="stable")]
        assert (np.diff(ordered) >= -1e-12).all()
    assert np.abs(standardized(r)).max() <= math.sqrt(len(r))
    for tied in np.unique(r):
        assert len(np.unique(standardized(r)[r == tied])) == 1


@given(st.floats(-5, 5), st.integers(1, 8))
def test_groups_of_equal_rewards_or_one_episode_are_dead(reward: float, size: int) -> None:
    group = [episode(reward, name=f"0/0/{i}") for i in range(size)]
    for name in COMPARING:
        weighted = algorithm(name)(group, max_tokens=4)
        assert weighted.dead
        assert weighted.advantages.tolist() == [0.0] * size
        assert not any(w.any() for w in weighted.policy_gradient.weights)


def test_group_is_dead_when_reward_spread_is_below_threshold() -> None:
    assert is_dead(np.array([0.5, 0.5 + DEAD_STD]))
    assert not is_dead(np.array([0.5, 0.5 + 2 * DEAD_STD]))


@pytest.mark.parametrize("name", COMPARING)
def test_episode_with_failed_verifier_is_excluded_from_its_group(name: str) -> None:
    alive = [episode(1.0, name="0/0/0"), episode(0.0, name="0/0/2"), episode(0.0, name="0/0/3")]
    failed = episode(None, failure="verifier: timed out", name="0/0/1")
    with_failure = algorithm(name)([alive[0], failed, *alive[1:]], max_tokens=4)
    without = algorithm(name)(alive, max_tokens=4)
    assert not with_failure.policy_gradient.weights[1].any()
    assert math.isnan(with_failure.advantages[1])
    assert with_failure.policy_gradient.denominator == without.policy_gradient.denominator
    kept = [with_failure.policy_gradient.weights[i] for i in (0, 2, 3)]
    for left, right in zip(kept, without.policy_gradient.weights, strict=True):
        assert left.tolist() == right.tolist()


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("name", COMPARING)
def test_grpo_and_dr_grpo_reject_non_finite_or_missing_rewards(name: str, reward: float | None) -> None:
    group = [episode(1.0), episode(reward, name="3/1/4")]
    with pytest.raises(WorkFailedError, match=r"episode 3/1/4 of task task-7"):
        algorithm(name)(group, max_tokens=4)


@pytest.mark.parametrize(
    ("mode", "constant", "expected"),
    [
        ("token-mean", None, 0.6),
        ("seq-mean-token-mean", None, 0.75),
        ("seq-mean-token-sum", None, 3.0),
        ("seq-mean-token-sum-norm", 16, 0.1875),
    ],
)
def test_aggregation_worked_example(mode: Aggregation, constant: int | None, expected: float) -> None:
    group = [episode(tokens=[1] * 2), episode(tokens=[1] * 8)]
    component = aggregate(group, [1.0, 1.0], mode, constant=constant)
    losses = [np.full(2, 1.0), np.full(8, 0.5)]
    total = sum((w * loss).sum() for w, loss in zip(component.weights, losses, strict=True))
    assert total / component.denominator == pytest.approx(expected)


def test_aggregation_ignores_masked_tokens() -> None:
    group = [episode(tokens=[1, 2, 3, 4], mask=[True, False, False, True])]
    component = aggregate(group, [2.0], "seq-mean-token-mean")
    assert component.weights[0].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert aggregate(group, [2.0], "token-mean").denominator == 2


def test_empty_and_truncated_responses_get_finite_advantages() -> None:
    group = [
        episode(0.0, tokens=[]),
        episode(1.0, tokens=[1, 2]),
        episode(0.0, tokens=[3] * 4, truncated=True),
    ]
    for name in COMPARING:
        weighted = algorithm(name)(group, max_tokens=4)
        assert weighted.policy_gradient.weights[0].shape == (0,)
        assert (weighted.policy_gradient.weights[2] < 0).all()
        assert np.isfinite(weighted.advantages).all()


@pytest.mark.parametrize(("mode", "constant"), [("seq-mean-token-sum-norm", None), ("token-mean", 4)])
def test_aggregation_constant_is_accepted_only_in_sum_norm_mode(
    mode: Aggregation, constant: int | None
) -> None:
    with pytest.raises(ValueError, match=mode):
        aggregate([episode()], [1.0], mode, constant=constant)


def test_dr_grpo_divides_by_max_tokens_at_any_response_length() -> None:
    group = [episode(1.0, tokens=[1] * 3), episode(0.0, tokens=[1] * 5)]
    first, second = algorithm("dr_grpo")(group, max_tokens=40).policy_gradient.weights
    assert first.tolist() == pytest.approx([0.5 / 40] * 3)
    assert second.tolist() == pytest.approx([-0.5 / 40] * 5)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_reference_kl_weights_follow_aggregation_and_skip_failed_episodes(name: str) -> None:
    failed = episode(None, failure="verifier: timed out", name="0/0/1")
    group = [episode(1.0, tokens=[1, 2, 3]), failed, episode(0.0, tokens=[4], name="0/0/2")]
    assert weighted_groups(name, [group])[0].reference_kl is None
    kl = weighted_groups(name, [group], kl=0.1)[0].reference_kl
    long, short, denominator = {
        "token-mean": (0.1, 0.1, 4),
        "seq-mean-token-mean": (0.1 / 3, 0.1, 2),
        "seq-mean-token-sum-norm": (0.1 / 8, 0.1 / 8, 2),
    }[getattr(algorithm(name), "aggregation", "token-mean")]
    found = [w.tolist() for w in kl.weights]
    assert found == [pytest.approx([long] * 3), [0.0, 0.0], pytest.approx([short])]
    assert kl.denominator == denominator


def test_unknown_algorithm_and_unknown_option_are_rejected() -> None:
    with pytest.raises(RequestError, match="'gpro'"):
        algorithm("gpro")
    assert algorithm("grpo", clip_high=0.2).surrogate.high == 1.2
    with pytest.raises(RequestError, match="clip_hi"):
        algorithm("grpo", clip_hi=0.2)
