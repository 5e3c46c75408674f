"""Each algorithm against worked examples and short references; properties that all algorithms share."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_cases import episode, random_groups, signals_for

from perilune.data.episode import Episode
from perilune.errors import RequestError, WorkFailedError
from perilune.learn import losses
from perilune.learn.advantages import generalized_advantages, leave_one_out, rewards_to_go, whitened
from perilune.learn.algorithms import RL_ALGORITHMS, StepContext, algorithm
from perilune.learn.algorithms.pass_at_k import sample_worth
from perilune.learn.checks import check_weights
from perilune.learn.signals import deviation_and_uncertainty
from perilune.learn.weights import Surrogate, WeightedGroup

GROUPED = [name for name, kind in RL_ALGORITHMS.items() if kind.compares == "group"]


def group_of(
    rewards: Sequence[float | None], lengths: Sequence[int] | None = None, g: int = 0
) -> list[Episode]:
    lengths = lengths or [2] * len(rewards)
    return [
        episode(
            reward,
            tokens=range(length),
            name=f"0/{g}/{i}",
            failure="" if reward is not None else "verifier: timed out",
        )
        for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]


def weight_groups(
    name: str, groups: Sequence[Sequence[Episode]], step: int = 0, **options
) -> list[WeightedGroup]:
    context = StepContext(max_tokens=8, step=step, signals=signals_for(groups))
    return algorithm(name, **options).weight_groups(groups, context)


def advantages(name: str, *rewards: Sequence[float], **options) -> list[float]:
    groups = [group_of(row, g=g) for g, row in enumerate(rewards)]
    return np.concatenate([group.advantages for group in weight_groups(name, groups, **options)]).tolist()


def test_rloo_worked_example() -> None:
    assert advantages("rloo", [1, 0, 0, 0]) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert advantages("rloo", [1, 0, 0, 0]) == pytest.approx(
        (4 / 3 * np.array(advantages("dr_grpo", [1, 0, 0, 0]))).tolist()
    )
    r = np.array([0.3, 2.0, np.nan, -1.0])
    others = [np.nanmean(np.delete(r, i)) for i in range(4)]
    np.testing.assert_allclose(leave_one_out(r), r - others)


def test_gigpo_compares_turns_after_the_same_observation() -> None:
    """Tokens 8 and 9 are observations. Two episodes see 8 before their second turn, and one sees 9."""
    mask = [True, False, True, True]
    turns = [[4, 8, 5, 6], [5, 8, 6, 5], [4, 9, 5, 5]]
    group = [
        episode(reward, tokens=tokens, mask=mask, name=f"0/0/{i}")
        for i, (reward, tokens) in enumerate(zip([1.0, 0.0, 0.0], turns, strict=True))
    ]
    (weighted,) = weight_groups("gigpo", [group], gamma=0.5, turn_weight=0.1, divide_by_std=False)
    assert weighted.policy_gradient is not None
    first = 0.5 * np.array([2 / 3, -1 / 3, -1 / 3])  # the returns of the first turn are 0.5, 0 and 0
    second = np.array([0.5, -0.5, 0.0])
    whole = np.array([2 / 3, -1 / 3, -1 / 3])
    for i, weights in enumerate(weighted.policy_gradient.weights):
        expected = [whole[i] + 0.1 * first[i], 0, *[whole[i] + 0.1 * second[i]] * 2]
        np.testing.assert_allclose(weights, expected, atol=1e-6)


def test_advantages_of_gigpo_may_cancel_in_most_turns() -> None:
    """After observation 8, the reward of 0.5 is the worse of two, but it is the better half of the group."""
    mask = [True, False, True, True, True, True]
    group = [
        episode(reward, tokens=[4, observed, 5, 5, 5, 5], mask=mask, name=f"0/0/{i}")
        for i, (reward, observed) in enumerate([(1.0, 8), (0.5, 8), (0.0, 9), (-0.5, 9)])
    ]
    (weighted,) = weight_groups("gigpo", [group], divide_by_std=False)
    assert weighted.policy_gradient is not None
    np.testing.assert_allclose(weighted.policy_gradient.weights[1][2:], 0.0, atol=1e-7)
    kind = algorithm("gigpo")
    check_weights([weighted], centred=kind.centred, sparse=kind.sparse)


def test_gigpo_without_turns_is_grpo() -> None:
    for groups in (random_groups(3), random_groups(4)):
        for ours, theirs in zip(
            weight_groups("gigpo", groups, turn_weight=0.0), weight_groups("grpo", groups), strict=True
        ):
            assert ours.policy_gradient is not None and theirs.policy_gradient is not None
            for a, b in zip(ours.policy_gradient.weights, theirs.policy_gradient.weights, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6)


def test_reinforce_pp_worked_examples() -> None:
    def one_token(name: str) -> list[float]:
        groups = [group_of([1, 0, 0, 0], [1] * 4, g=0), group_of([1, 1, 1, 0], [1] * 4, g=1)]
        return [float(a) for group in weight_groups(name, groups) for a in group.advantages]

    assert one_token("reinforce_pp_baseline")[0] == pytest.approx(1.620, abs=5e-4)
    assert one_token("reinforce_pp")[0] == pytest.approx(0.935, abs=5e-4)
    centred = np.array([0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75])
    np.testing.assert_allclose(one_token("reinforce_pp_baseline"), centred / centred.std(ddof=1), rtol=1e-6)


def test_whitening_over_tokens_weights_answers_by_length() -> None:
    values = [np.ones(1), np.zeros(9)]
    short, long = whitened(values, [np.ones(1, bool), np.ones(9, bool)])
    assert short[0] == pytest.approx(0.9 / np.std([1] + [0] * 9, ddof=1))
    assert short.sum() + long.sum() == pytest.approx(0)


def test_rewards_to_go_discount_over_unmasked_tokens_only() -> None:
    mask = np.array([True, False, True, True])
    returns = rewards_to_go(np.array([0.0, 9.0, 0.0, 2.0]), mask, 0.5)
    assert returns.tolist() == [0.5, 0, 1, 2]


def test_reinforce_pp_works_with_one_sample_per_prompt() -> None:
    assert advantages("reinforce_pp", [1.0], [0.0]) == pytest.approx([math.sqrt(3) / 2, -math.sqrt(3) / 2])


def test_gae_worked_example() -> None:
    found = generalized_advantages(
        np.array([0.0, 0, 1]), np.array([0.5, 0.6, 0.8]), np.ones(3, bool), gamma=1.0, lam=0.95
    )
    assert found == pytest.approx([0.4705, 0.39, 0.2])


def test_gae_skips_masked_tokens() -> None:
    inner = generalized_advantages(
        np.array([0.0, 7, 0, 1]), np.array([0.5, 9, 0.6, 0.8]), np.array([True, False, True, True]),
        gamma=1.0, lam=0.95,
    )  # fmt: skip
    assert inner == pytest.approx([0.4705, 0, 0.39, 0.2])


def test_ppo_whitens_advantages_and_not_returns() -> None:
    groups = [group_of([1.0, 0.0], [3, 2])]
    values = {"0/0/0": np.array([0.5, 0.6, 0.8], np.float32), "0/0/1": np.array([0.1, 0.2], np.float32)}
    (group,) = algorithm("ppo").weight_groups(groups, StepContext(max_tokens=8, signals={"values": values}))
    raw = [np.array([0.4705, 0.39, 0.2]), np.array([-0.09, -0.2])]
    flat = np.concatenate(raw)
    for weights, a in zip(group.policy_gradient.weights, raw, strict=True):
        np.testing.assert_allclose(weights, (a - flat.mean()) / flat.std(ddof=1), rtol=1e-6)
    np.testing.assert_allclose(group.value.returns[0], raw[0] + values["0/0/0"], rtol=1e-6)
    np.testing.assert_allclose(group.value.returns[1], raw[1] + values["0/0/1"], atol=1e-7)
    assert group.value.component.denominator == 5


def test_dapo_penalizes_length_in_the_last_fifth_of_the_budget() -> None:
    lengths = np.array([16384.0, 18432, 20480])
    assert algorithm("dapo").overlong(lengths, 20480).tolist() == pytest.approx([0, -0.5, -1])
    assert algorithm("dapo", overlong_buffer=0.0).overlong(lengths, 20480).tolist() == [0, 0, 0]


def test_dapo_length_penalty_does_not_revive_groups_of_equal_outcomes() -> None:
    (solved,) = weight_groups("dapo", [group_of([1, 1, 1], [2, 7, 8])])
    assert solved.dead
    assert not any(w.any() for w in solved.policy_gradient.weights)
    (mixed,) = weight_groups("dapo", [group_of([1, 1, 0], [2, 8, 2])])
    assert mixed.advantages[0] > mixed.advantages[1]
    assert algorithm("dapo").refills == 10


def test_clip_ranges_match_the_papers() -> None:
    assert algorithm("dapo").surrogate == Surrogate(low=0.8, high=1.28)
    assert algorithm("gspo").surrogate == Surrogate(ratio="sequence", low=1 - 3e-4, high=1 + 4e-4)
    assert algorithm("gspo").aggregation == "seq-mean-token-mean"
    (mean,) = weight_groups("gspo", [group_of([1, 0], [2, 8])], aggregation="token-mean")
    assert mean.policy_gradient.denominator == 10  # an explicit option overrides the default of gspo
    assert algorithm("cispo").surrogate == Surrogate(clip="weight", low=0.0, high=5.0)


def test_cispo_rejects_ratio_max_that_clips_on_policy_tokens() -> None:
    with pytest.raises(Exception, match="ratio_max"):
        algorithm("cispo", ratio_max=0.2)
    logprobs = torch.zeros(2, requires_grad=True)
    surrogate = algorithm("cispo").surrogate
    loss, bounded = losses.policy_gradient(logprobs, torch.zeros(2), torch.tensor([1.0, -1.0]), surrogate)
    loss.backward()
    assert logprobs.grad.tolist() == [-1, 1]
    assert not bounded.any()


def test_maxrl_divides_advantages_by_the_mean_reward() -> None:
    assert advantages("maxrl", [1, 0, 0, 0]) == pytest.approx([3, -1, -1, -1])
    assert advantages("maxrl", [0, 0, 0, 0]) == [0] * 4
    with pytest.raises(WorkFailedError, match="task-7 has a reward of -1"):
        advantages("maxrl", [1, -1])


def test_pkpo_worked_example() -> None:
    assert [sample_worth(True, 4, 0, 2), sample_worth(False, 4, 1, 2)] == pytest.approx([0.5, 1 / 6])


@pytest.mark.parametrize("n", [4, 6])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_pkpo_gradient_estimate_of_pass_at_k_is_unbiased(n: int, k: int) -> None:
    """The expectation over all 2^n outcomes of a Bernoulli policy equals d/dp of 1 - (1 - p)^k."""
    p, gradient = 0.3, 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=n):
        right = np.array(outcome)
        chance = p ** right.sum() * (1 - p) ** (n - right.sum())
        score = np.where(right == 1, 1 / p, -1 / (1 - p))
        gradient += chance * (algorithm("pkpo", k=k).advantages(right) * score).mean()
    assert gradient == pytest.approx(k * (1 - p) ** (k - 1))


def test_pkpo_with_k_1_equals_rloo() -> None:
    assert advantages("pkpo", [1, 0, 0, 1, 0], k=1) == pytest.approx(advantages("rloo", [1, 0, 0, 1, 0]))


def test_pass_at_k_training_worked_example() -> None:
    found = advantages("pass_at_k_training", [1, 1, 0, 0, 0, 0, 0, 0], k=4)
    assert found[0] == pytest.approx(0.52223, abs=5e-6)
    assert found[-1] == pytest.approx(-0.17408, abs=5e-6)
    assert sum(found) == pytest.approx(0, abs=1e-6)


def test_pass_at_k_training_equals_mean_over_all_groups_of_k() -> None:
    right = [1, 1, 0, 0, 0, 0]
    drawn = list(itertools.combinations(range(6), 3))
    passed = np.array([max(right[i] for i in subset) for subset in drawn], float)
    z = (passed - passed.mean()) / passed.std()
    mean = [np.mean([z[j] for j, subset in enumerate(drawn) if i in subset]) for i in range(6)]
    assert advantages("pass_at_k_training", right, k=3) == pytest.approx(mean)


def test_pass_at_k_training_group_is_dead_when_every_subset_of_k_passes() -> None:
    (group,) = weight_groups("pass_at_k_training", [group_of([1, 1, 1, 0])], k=2)
    assert group.dead
    assert not any(w.any() for w in group.policy_gradient.weights)


@pytest.mark.parametrize(
    ("step", "threshold", "expected"),
    [(0, 0.5, [1, 1, 0, 0]), (0, 0.8, [1, 1, 1, 0]), (10, 0.5, [1, 1, 1, 0])],
)
def test_toggle_worked_example(step: int, threshold: float, expected: list[int]) -> None:
    toggle = algorithm("toggle", threshold=threshold)
    rewards = toggle.toggle_rewards(np.array([1.0, 1, 1, 0]), np.array([100, 200, 400, 300]), 200, step)
    assert rewards.tolist() == expected


def test_toggle_fixes_budget_at_first_right_answer() -> None:
    toggle, memory = algorithm("toggle", percentile=100.0), {}

    def step(number: int, rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
        context = StepContext(max_tokens=99, step=number, memory=memory)
        return toggle.weight_groups([group_of(rewards, lengths)], context)[0].advantages.tolist()

    step(0, [0, 0], [9, 9])
    assert memory == {"budgets": {}}  # no right answer: no budget
    step(1, [1, 0], [4, 9])
    assert memory == {"budgets": {"task-7": 4.0}}
    later = step(2, [1, 1, 0], [4, 5, 1])
    assert memory == {"budgets": {"task-7": 4.0}}
    assert later[0] > 0 > later[1] == later[2]  # the longer right answer exceeds the budget and scores zero


def test_dgpo_worked_example() -> None:
    policy = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.98, 0.01, 0.01]], dtype=torch.float64)
    reference = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.2, 0.4, 0.4]], dtype=torch.float64)
    d, h = deviation_and_uncertainty(policy.log(), reference.log())
    assert d.tolist() == pytest.approx([0, 0.06754, 0.43079], abs=5e-6)
    assert h.tolist() == pytest.approx([0.93723, 0.93723, 0.10186], abs=5e-6)
    group = group_of([1, 0], [3, 3])
    signals = {
        "deviation": {e.episode_id: d.float().numpy() for e in group},
        "uncertainty": {e.episode_id: h.float().numpy() for e in group},
    }
    (dgpo,) = algorithm("dgpo").weight_groups([group], StepContext(max_tokens=8, signals=signals))
    shares = dgpo.policy_gradient.weights[0] / dgpo.advantages[0]
    assert shares.tolist() == pytest.approx([0.92974, 1.05523, 1.01502], abs=1e-5)
    assert shares.sum() == pytest.approx(3)  # the total weight of an answer does not change
    assert shares[2] < shares[1]  # the confident deviation ranks below the uncertain one
    every = np.concatenate([shares, shares])
    assert dgpo.figures == pytest.approx({"dgpo_weight_std": every.std(), "dgpo_weight_max": every.max()})


def test_dgpo_without_deviation_equals_grpo() -> None:
    group = group_of([1, 0, 0], [3, 2, 4])
    flat = {e.episode_id: np.zeros(len(e.token_ids), np.float32) for e in group}
    context = StepContext(max_tokens=8, signals={"deviation": flat, "uncertainty": flat})
    (dgpo,) = algorithm("dgpo").weight_groups([group], context)
    grpo = algorithm("grpo")(group, max_tokens=8)
    for weights, other in zip(dgpo.policy_gradient.weights, grpo.policy_gradient.weights, strict=True):
        np.testing.assert_allclose(weights, other, rtol=1e-6)
    assert dgpo.figures["dgpo_weight_std"] == pytest.approx(0, abs=1e-9)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=9), st.booleans())
def test_dgpo_token_weights_are_bounded_and_sum_to_answer_length(
    pairs: list[tuple[float, float]], squared: bool
) -> None:
    one = episode(1.0, tokens=range(len(pairs)))
    d, h = np.array(pairs, np.float32).T
    signals = {"deviation": {one.episode_id: d}, "uncertainty": {one.episode_id: h}}
    shares = algorithm("dgpo", squared=squared).token_weights(one, StepContext(max_tokens=9, signals=signals))
    assert shares.sum() == pytest.approx(len(pairs))
    assert shares.max() / shares.min() <= math.exp(1 / 0.5) * (1 + 1e-6)


def test_ppo_groups_are_dead_if_all_rewards_of_the_batch_are_equal() -> None:
    """Then advantages are only errors of the critic."""

    def dead(*groups: list[Episode]) -> list[bool]:
        values = {e.episode_id: np.array([0.3, -0.2], np.float32) for group in groups for e in group}
        weighted = algorithm("ppo").weight_groups(
            groups, StepContext(max_tokens=8, signals={"values": values})
        )
        assert weighted[0].has_weights  # the critic learns from them
        return [group.dead for group in weighted]

    def one(reward: float | None, name: str, **fields: Any) -> Episode:
        failure = "" if reward is not None else "verifier: it died"
        return replace(episode(reward, failure=failure, name=name), **fields)

    assert dead([one(0.5, "0/0/0")], [one(0.5, "0/1/0")], [one(None, "0/2/0")]) == [True] * 3
    assert dead([one(0.5, "0/0/0")], [one(0.0, "0/1/0")]) == [False] * 2
    assert dead([one(0.5, "0/0/0")]) == [False]
    stepped = one(0.5, "0/0/0", step_rewards=np.array([np.nan, 0.1], np.float32))
    assert dead([stepped, one(0.5, "0/0/1")]) == [False]


def test_ppo_names_episode_and_signal_when_values_are_missing() -> None:
    with pytest.raises(ValueError, match=r"0/0/0 lacks the signal values"):
        algorithm("ppo").weight_groups([group_of([1, 0])], StepContext(max_tokens=8))


# Properties of all algorithms.


@pytest.mark.parametrize("name", list(RL_ALGORITHMS))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_every_algorithm_rejects_non_finite_rewards(name: str, bad: float) -> None:
    group = [*group_of([1, 0, 1, 0, 1]), episode(bad, name="3/1/4")]
    with pytest.raises(WorkFailedError, match=r"episode 3/1/4 of task task-7 has reward"):
        weight_groups(name, [group])


@pytest.mark.parametrize("name", list(RL_ALGORITHMS))
def test_masked_tokens_and_failed_episodes_have_zero_weight(name: str) -> None:
    group = group_of([1, 0, None, 1, 0, 0], [3, 2, 2, 4, 1, 2])
    tool = episode(0.0, tokens=[1, 2, 3], mask=[True, False, True], name="0/0/9")
    (weighted,) = weight_groups(name, [[*group, tool]])
    assert not weighted.policy_gradient.weights[2].any()
    assert math.isnan(weighted.advantages[2])
    assert weighted.policy_gradient.weights[6][1] == 0
    assert weighted.policy_gradient.weights[6][0] != 0
    assert all(np.isfinite(w).all() for w in weighted.policy_gradient.weights)


@pytest.mark.parametrize("name", list(RL_ALGORITHMS))
@pytest.mark.parametrize("shape", ["no group", "empty group", "singleton", "all failed", "empty answers"])
def test_degenerate_groups_have_zero_weights(name: str, shape: str) -> None:
    groups = {
        "no group": [],
        "empty group": [[]],
        "singleton": [group_of([1.0])],
        "all failed": [group_of([None, None])],
        "empty answers": [group_of([1.0, 0.0], [0, 0])],
    }[shape]
    weighted = weight_groups(name, groups)
    check_weights(weighted, centred=False)
    for group in weighted:
        if name != "ppo" or shape != "singleton":
            assert not any(w.any() for w in group.policy_gradient.weights)
        assert len(group.advantages) == len(group.episodes)


@pytest.mark.parametrize("name", GROUPED)
@settings(max_examples=20, deadline=None)
@given(st.floats(0, 5), st.integers(2, 8))
def test_groups_of_equal_rewards_are_dead(name: str, reward: float, size: int) -> None:
    (group,) = weight_groups(name, [group_of([reward] * size)])
    assert group.dead
    assert not any(w.any() for w in group.policy_gradient.weights)


@pytest.mark.parametrize("name", GROUPED)
@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=5, max_size=8))
@settings(max_examples=20, deadline=None)
def test_advantages_rank_right_answers_first_and_are_equal_for_ties(name: str, row: list[float]) -> None:
    found = np.array(advantages(name, row))
    right = np.array(row) == 1
    for tied in (found[right], found[~right]):
        if name != "dgpo":  # its advantages are means over tokens
            assert len(tied) == 0 or np.ptp(tied) < 1e-6
    if right.any() and not right.all():
        assert found[right].min() >= found[~right].max() - 1e-6


@pytest.mark.parametrize("name", list(RL_ALGORITHMS))
@given(st.integers(0, 1000), st.randoms(use_true_random=False))
@settings(max_examples=8, deadline=None)
def test_weights_do_not_depend_on_order_of_groups_or_episodes(name: str, seed: int, shuffler) -> None:
    groups = [
        [replace(answer, task_id=f"task-{g}") for answer in group]
        for g, group in enumerate(random_groups(seed, groups=3, size=5))
    ]
    order = [(g, i) for g in range(3) for i in range(5)]
    shuffled = [shuffler.sample([(g, i) for i in range(5)], 5) for g in (2, 0, 1)]
    signals = signals_for(groups)

    def run(chosen: list[list[tuple[int, int]]]) -> dict[tuple[int, int], np.ndarray]:
        context = StepContext(max_tokens=8, signals=signals)
        weighted = algorithm(name).weight_groups([[groups[g][i] for g, i in row] for row in chosen], context)
        return {
            pair: weights
            for row, group in zip(chosen, weighted, strict=True)
            for pair, weights in zip(row, group.policy_gradient.weights, strict=True)
        }

    plain, mixed = run([[(g, i) for i in range(5)] for g in range(3)]), run(shuffled)
    for pair in order:
        np.testing.assert_allclose(mixed[pair], plain[pair], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", list(RL_ALGORITHMS))
def test_mask_truncated_drops_answers_from_loss_but_not_from_baseline(name: str) -> None:
    group = [*group_of([1, 0, 0, 1, 0]), episode(0.0, tokens=[1, 2, 3], truncated=True, name="0/0/9")]
    (kept,) = weight_groups(name, [group])
    (masked,) = weight_groups(name, [group], mask_truncated=True)
    assert kept.policy_gradient.weights[5].any()
    assert not masked.policy_gradient.weights[5].any()
    assert masked.policy_gradient.denominator < kept.policy_gradient.denominator
    assert masked.advantages.tolist() == kept.advantages.tolist()


@pytest.mark.parametrize("name", list(RL_ALGORITHMS))
def test_mask_truncated_leaves_an_answer_out_of_every_component(name: str) -> None:
    group = [*group_of([1, 0, 0, 1, 0]), episode(0.0, tokens=[1, 2, 3], truncated=True, name="0/0/9")]
    context = StepContext(max_tokens=8, kl=0.1, signals=signals_for([group]))
    options = {"mask_truncated": True, "entropy_bonus": 0.01}
    (masked,) = algorithm(name, **options).weight_groups([group], context)
    assert {"policy_gradient", "reference_kl", "entropy"} <= masked.components.keys()
    for component in masked.components.values():
        assert [weights.any() for weights in component.weights[4:]] == [True, False]
        assert component.counts[5] == 0


def test_dgpo_may_give_one_token_all_the_weight() -> None:
    group = group_of([1, 0], lengths=[6, 6])
    spiked = {e.episode_id: np.array([0, 0, 0.9, 0, 0, 0], np.float32) for e in group}
    ones = {e.episode_id: np.ones(6, np.float32) for e in group}
    context = StepContext(max_tokens=8, signals={"deviation": spiked, "uncertainty": ones})
    dgpo = algorithm("dgpo", tau=0.005)
    weighted = dgpo.weight_groups([group], context)
    assert [np.count_nonzero(weights) for weights in weighted[0].policy_gradient.weights] == [1, 1]
    check_weights(weighted, centred=dgpo.centred, sparse=dgpo.sparse)


def test_unknown_algorithms_and_invalid_options_are_named_with_a_remedy() -> None:
    with pytest.raises(RequestError, match=r"no algorithm is called 'grpoo'\n  try: did you mean 'grpo'\?"):
        algorithm("grpoo")
    with pytest.raises(RequestError, match=r"grpo: clip_hihg: Extra inputs .*\n  try: options: .*clip_high"):
        algorithm("grpo", clip_hihg=0.3)
