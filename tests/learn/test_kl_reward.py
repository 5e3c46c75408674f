"""KL penalty in the reward (k1_reward) against the formula of TRL and a plain definition."""

import numpy as np
import pytest
from learning_cases import episode, random_groups, signals_for, small_decoder

from perilune.learn.advantages import rewards_to_go, whitened
from perilune.learn.algorithms import StepContext, algorithm
from perilune.learn.kl_reward import weight_groups
from perilune.learn.signals import SignalModels, compute_signals

KL = 0.3


@pytest.fixture
def context() -> StepContext:
    """A context for random groups, with reference log-probs."""
    groups = random_groups(2)
    models = SignalModels(small_decoder(), small_decoder(4))
    signals = compute_signals({"reference_logprobs"}, groups, models, token_budget=50)
    return StepContext(8, KL, "k1_reward", signals={**signals_for(groups), **signals})


def test_rloo_subtracts_summed_kl_from_rewards_before_baseline(context: StepContext) -> None:
    """TRL's RLOO: rewards - beta * sum of (old log-prob - reference log-prob), then leave-one-out."""
    groups = random_groups(2)
    theirs = context.signals["reference_logprobs"]
    for group, weighted in zip(groups, weight_groups(algorithm("rloo"), groups, context), strict=True):
        paid = [e.reward - KL * ((e.logprobs - theirs[e.episode_id]) * e.loss_mask).sum() for e in group]
        expected = [r - (sum(paid) - r) / (len(paid) - 1) for r in paid]
        np.testing.assert_allclose(weighted.advantages, expected, rtol=1e-5, atol=1e-6)
        assert weighted.reference_kl is None  # the KL is not added to the loss again
        assert [e.reward for e in weighted.episodes] == [e.reward for e in group]
        assert weighted.figures["kl_reference"] > 0


def test_reinforce_pp_subtracts_kl_from_each_token_reward(context: StepContext) -> None:
    groups = random_groups(2)
    theirs = context.signals["reference_logprobs"]
    returns, masks = [], []
    for answer in (answer for group in groups for answer in group):
        earned = -KL * (answer.logprobs - theirs[answer.episode_id]) * answer.loss_mask
        earned[np.flatnonzero(answer.loss_mask)[-1]] += answer.reward
        returns.append(rewards_to_go(earned, answer.loss_mask, 1.0))
        masks.append(answer.loss_mask)
    expected = whitened(returns, masks)
    component = [
        w
        for group in weight_groups(algorithm("reinforce_pp"), groups, context)
        for w in group.policy_gradient.weights
    ]
    for weights, right in zip(component, expected, strict=True):
        np.testing.assert_allclose(weights, right, rtol=1e-4, atol=1e-5)


def test_kl_reward_is_zero_when_policy_equals_reference() -> None:
    groups = random_groups(2)
    own = {answer.episode_id: answer.logprobs for group in groups for answer in group}
    groups[0].append(episode(1.0, prompt=groups[0][0].prompt_ids, tokens=(), name="0/0/9"))  # has no signal
    context = StepContext(8, KL, "k1_reward", signals={"reference_logprobs": own})
    with_kl = weight_groups(algorithm("grpo"), groups, context)
    without = algorithm("grpo").weight_groups(groups, StepContext(8))
    for group, other in zip(with_kl, without, strict=True):
        np.testing.assert_array_equal(group.advantages, other.advantages)
        assert group.figures["kl_reference"] == 0
