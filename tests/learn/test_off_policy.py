"""Off-policy corrections against worked examples: token weights, denominators and metrics."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from learning_cases import episode, plain_logprobs, random_groups, small_critic, small_decoder
from pydantic import ValidationError

from perilune.errors import RequestError
from perilune.learn import signals
from perilune.learn.algorithms import StepContext, algorithm
from perilune.learn.batch import minibatches, pack
from perilune.learn.figures import merge_updates
from perilune.learn.off_policy import (
    OffPolicySettings,
    bound_weights,
    correct_weights,
    effective_share,
    exp_log_ratio,
    learning_rate_scale,
    pool_weights,
)
from perilune.learn.signals import SignalModels, compute_signals
from perilune.learn.trainer import Learner, add_reference_logprobs
from perilune.learn.weights import WeightedGroup
from perilune.models.attention import PackedAttention

LOG_W = np.array([0, 0.3, -0.5, 1.2, 2])


def test_bounds_worked_example() -> None:
    assert bound_weights(LOG_W, "truncate", 0, 2) == pytest.approx([1, 1.350, 0.607, 2, 2], abs=5e-4)
    assert bound_weights(LOG_W, "mask", 0, 2) == pytest.approx([1, 1.350, 0.607, 0, 0], abs=5e-4)  # MIS
    # IcePop.
    assert bound_weights(LOG_W, "mask", 0.5, 5) == pytest.approx([1, 1.350, 0.607, 3.320, 0], abs=5e-4)
    assert bound_weights(LOG_W, "none", 0, 2).tolist() == [1] * 5


def test_ess_of_unbounded_weights_scales_the_learning_rate() -> None:
    assert effective_share(exp_log_ratio(LOG_W)) == pytest.approx(0.543, abs=5e-4)
    assert effective_share(bound_weights(LOG_W, "truncate", 0, 2)) == pytest.approx(0.865, abs=5e-4)
    settings = OffPolicySettings(ess_target=1.0)
    assert learning_rate_scale({"ess": effective_share(exp_log_ratio(LOG_W))}, settings) == pytest.approx(
        0.737, abs=5e-4
    )
    assert learning_rate_scale({"ess": 0.9}, OffPolicySettings(ess_target=0.5)) == 1
    assert learning_rate_scale({"ess": 0.1}, OffPolicySettings()) == 1


def test_sequence_product_and_geometric_mean_weights_differ() -> None:
    drift = np.full(1000, 0.002)
    assert exp_log_ratio(pool_weights(drift, "sequence-product"))[0] == pytest.approx(7.39, abs=5e-3)
    assert exp_log_ratio(pool_weights(drift, "sequence-geometric"))[0] == pytest.approx(1.002, abs=5e-6)


def sampled(log_w: Sequence[Sequence[float]], rewards: Sequence[float], versions: Sequence[int] = ()):
    """A weighted group whose learner differs from its sampler by `log_w`, and the learner's log-probs."""
    group = [
        episode(
            reward, tokens=range(len(row)), logprobs=[-2.0] * len(row), name=f"0/0/{i}",
            version=versions[i] if versions else 0,
        )
        for i, (row, reward) in enumerate(zip(log_w, rewards, strict=True))
    ]  # fmt: skip
    logprobs = {f"0/0/{i}": np.array(row, np.float32) - 2 for i, row in enumerate(log_w)}
    return algorithm("grpo")(group, max_tokens=8, kl=0.1), logprobs


def corrected(weighted, logprobs, version: int = 0, **options) -> tuple[WeightedGroup, dict[str, float]]:
    (group,), figures = correct_weights([weighted], logprobs, OffPolicySettings(**options), version)
    return group, figures


def factors(group: WeightedGroup, before: WeightedGroup) -> list[list[float]]:
    """The factor between each token's weight before and after the correction."""
    pairs = zip(group.policy_gradient.weights, before.policy_gradient.weights, strict=True)
    return [(after / once).tolist() for after, once in pairs]


def test_default_settings_change_no_weight() -> None:
    weighted, _ = sampled([[0.5, 2], [0, 0]], [1, 0])
    group, figures = corrected(weighted, {})
    assert factors(group, weighted) == [[1, 1], [1, 1]]
    assert group.proximal is None
    assert figures == {}


def test_token_truncation() -> None:
    weighted, logprobs = sampled([[0.5, 2], [0, -1]], [1, 0])
    group, figures = corrected(weighted, logprobs, proximal="learner", weight="truncate")
    assert factors(group, weighted)[0] == pytest.approx([math.exp(0.5), 2])
    assert factors(group, weighted)[1] == pytest.approx([1, math.exp(-1)])
    assert [p.tolist() for p in group.proximal] == [logprobs["0/0/0"].tolist(), logprobs["0/0/1"].tolist()]
    assert group.reference_kl is weighted.reference_kl
    assert figures["weights_above"] == 0.25
    assert figures["weight_max"] == pytest.approx(math.exp(2))
    assert figures["ess"] == pytest.approx(effective_share(np.exp([2.5, -1])), rel=1e-6)
    products = np.array([2 * math.exp(0.5), math.exp(-1)])  # of the bounded weights
    assert figures["ess_bounded"] == pytest.approx(effective_share(products), rel=1e-6)
    assert figures["perplexity_ratio"] == pytest.approx(math.exp(-(0.5 + 2 + 0 - 1) / 4), rel=1e-6)
    assert figures["chi2_token"] == pytest.approx(np.mean(np.exp([1.0, 4, 0, -2])) - 1, rel=1e-6)
    assert figures["chi2_sequence_product"] == pytest.approx(np.mean(np.exp([5.0, -2])) - 1, rel=1e-6)


@pytest.mark.parametrize(
    ("level", "expected"), [("sequence-product", math.exp(0.6)), ("sequence-geometric", math.exp(0.3))]
)
def test_sequence_level_gives_all_tokens_of_an_answer_one_weight(level: str, expected: float) -> None:
    weighted, logprobs = sampled([[0.1, 0.5], [0, 0]], [1, 0])
    group, _ = corrected(weighted, logprobs, proximal="learner", weight="truncate", level=level)
    assert factors(group, weighted)[0] == pytest.approx([expected] * 2, rel=1e-6)


def test_denominator_keeps_masked_tokens_and_drops_rejected_answers() -> None:
    weighted, logprobs = sampled([[0.0, 2], [0, 0, 0]], [1, 0])
    masked, figures = corrected(weighted, logprobs, proximal="learner", weight="mask", bounds=(0.5, 5.0))
    assert factors(masked, weighted) == [[1, 0], [1, 1, 1]]
    assert masked.policy_gradient.denominator == 5
    assert figures["tokens_masked"] == pytest.approx(0.2)
    rejected, figures = corrected(weighted, logprobs, reject="sequence-geometric")
    assert factors(rejected, weighted) == [[0, 0], [1, 1, 1]]
    assert rejected.policy_gradient.denominator == 3
    assert rejected.reference_kl.denominator == 5
    assert figures["answers_rejected"] == 0.5
    assert rejected.proximal is None  # the ratio is still to the sampler


def test_rejection_by_k3() -> None:
    weighted, logprobs = sampled([[0.1, -0.1], [0.3, -0.3]], [1, 0])
    k3 = [np.mean([math.exp(x) - 1 - x for x in (s, -s)]) for s in (0.1, 0.3)]
    assert k3[0] < 0.01 < k3[1]
    group, _ = corrected(weighted, logprobs, reject="sequence-k3", reject_bounds=(0.0, 0.01))
    assert factors(group, weighted) == [[1, 1], [0, 0]]


def test_mask_negative_masks_unlikely_answers_of_negative_advantage() -> None:
    """Masks answers that have a negative advantage and have become less likely under the learner."""
    weighted, logprobs = sampled([[-0.6, -0.6], [-0.6, -0.6], [-0.4, -0.4], [0.6, 0.6]], [1, 0, 0, 0])
    group, _ = corrected(weighted, logprobs, mask_negative=0.5)
    assert factors(group, weighted) == [[1, 1], [0, 0], [1, 1], [1, 1]]
    assert group.policy_gradient.denominator == 8


def test_max_staleness_masks_tokens_of_old_policy_versions() -> None:
    weighted, _ = sampled([[0, 0], [0, 0]], [1, 0], versions=[3, 5])
    group, figures = corrected(weighted, {}, version=6, max_staleness=2)
    assert factors(group, weighted) == [[0, 0], [1, 1]]
    assert figures == {"tokens_masked": 0.5, "answers_rejected": 0.0}


@pytest.mark.parametrize(
    "options",
    [
        {"weight": "truncate"},  # the default ratio to the sampler already corrects
        {"bounds": (2.0, 1.0)},
        {"reject_bounds": (-1.0, 1.0)},
        {"levle": "token"},
        {"proximal": "learner", "bounds": (0.0, 5.0)},  # nothing is bounded without `weight`
        {"proximal": "learner", "level": "sequence-product"},
        {"reject_bounds": (0.5, 2.0)},
    ],
)
def test_off_policy_settings_reject_invalid_options(options: dict) -> None:
    with pytest.raises(ValidationError):
        OffPolicySettings(**options)


def test_decoupled_loss_equals_its_definition() -> None:
    """-sum w' min(ratio A, clip(ratio) A) / tokens in float64, with ratios to the learner before the step.

    The corrected KL uses the ratio to the sampler.
    """
    decoder = small_decoder(dtype=torch.float64)
    groups = random_groups(4)
    signals = compute_signals({"logprobs"}, groups, SignalModels(small_decoder(seed=2)), token_budget=30)
    settings = OffPolicySettings(proximal="learner", weight="truncate", bounds=(0.0, 1.5))
    context = StepContext(max_tokens=8, kl=0.1, kl_estimator="k3_corrected")
    weighted = algorithm("grpo").weight_groups(groups, context)
    fixed, _ = correct_weights(weighted, signals["logprobs"], settings, 0)
    learner, reference = Learner(decoder), small_decoder(9, torch.float64)
    loss = learner.forward_backward(add_reference_logprobs(pack(fixed, 25), reference))["loss"]

    plain = small_decoder(dtype=torch.float64)
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for group in weighted:
        for answer, advantage in zip(group.episodes, group.advantages.tolist(), strict=True):
            old = torch.from_numpy(signals["logprobs"][answer.episode_id]).double()
            mask = torch.from_numpy(answer.loss_mask)
            w = (old - torch.from_numpy(answer.logprobs)).exp().clamp(max=1.5)
            now = plain_logprobs(plain, answer)
            r = (now - old).exp()
            total = total - (w * torch.minimum(r * advantage, r.clamp(0.8, 1.28) * advantage))[mask].sum()
            x = now - plain_logprobs(reference, answer).detach()
            corrected_kl = (now - torch.from_numpy(answer.logprobs)).exp() * ((-x).exp() - 1 + x)
            total = total + 0.1 * corrected_kl[mask].sum()
            tokens += int(mask.sum())
    (total / tokens).backward()
    assert loss == pytest.approx((total / tokens).item(), rel=2e-5)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(
            learner.optimizer.parameters[name].grad, parameter.grad, rtol=2e-4, atol=1e-6
        )


# Signals.


@pytest.mark.parametrize("budget", [12, 10_000])
def test_signals_equal_those_of_each_episode_alone(budget: int) -> None:
    decoder, reference = small_decoder(), small_decoder(seed=7)
    critic = small_critic(decoder)
    groups = [
        [*group, episode(None, failure="verifier: no", name=f"9/{g}/9")]
        for g, group in enumerate(random_groups(1))
    ]
    names = {"logprobs", "values", "deviation", "uncertainty"}
    models = SignalModels(decoder, reference, critic)
    found = compute_signals(names, groups, models, token_budget=budget, temperature=0.7)
    for group in groups:
        for answer in group:
            if answer.failure:
                assert answer.episode_id not in found["logprobs"]
                continue
            p, values = _distributions(decoder, answer, 0.7, critic)
            q, _ = _distributions(reference, answer, 0.7, critic)
            expected = {
                "logprobs": p.gather(1, torch.from_numpy(answer.token_ids.astype(np.int64))[:, None])[:, 0],
                "values": values,
                "deviation": 1 - ((p + q) / 2).exp().sum(1),
                "uncertainty": -(p.exp() * p).sum(1) / math.log(p.shape[1]),
            }
            for name, values in expected.items():
                signal = found[name][answer.episode_id]
                assert not signal[~answer.loss_mask].any()
                np.testing.assert_allclose(
                    signal[answer.loss_mask], values.detach().numpy()[answer.loss_mask], atol=2e-6
                )


def test_ppo_bootstraps_truncated_answers_from_the_value_of_the_last_state() -> None:
    decoder = small_decoder()
    critic = small_critic(decoder)
    groups = [
        [
            episode(1.0, tokens=[4, 5, 6], name="0/0/0"),
            episode(0.0, tokens=[7, 8], truncated=True, name="0/0/1"),
        ],
        [
            episode(0.0, tokens=[9], truncated=True, name="0/1/0"),
            episode(None, failure="verifier: no", name="0/1/1"),
        ],
    ]
    top = np.zeros((2, 1))
    groups[0][1] = replace(groups[0][1], top_ids=top.astype(np.int32), top_logprobs=top.astype(np.float32))
    found = compute_signals(
        {"values", "values_after"}, groups, SignalModels(decoder, critic=critic), token_budget=9
    )
    assert found["values_after"].keys() == {"0/0/1", "0/1/0"}
    for e in (groups[0][1], groups[1][0]):
        ids = torch.from_numpy(np.concatenate([e.prompt_ids, e.token_ids]).astype(np.int64))
        states = decoder(ids, torch.arange(len(ids)), PackedAttention(torch.tensor([0, len(ids)])))
        assert found["values_after"][e.episode_id][-1] == pytest.approx(critic(states)[-1].item(), abs=2e-6)

    ppo = algorithm("ppo", bootstrap_truncated=True, lam=0.9, gamma=0.8)
    assert ppo.needs == {"values", "values_after"} and algorithm("ppo").needs == {"values"}
    context = StepContext(max_tokens=8, signals=found)
    weighted = ppo.weight_groups(groups, context)
    before, after = found["values"]["0/0/1"].tolist(), float(found["values_after"]["0/0/1"][-1])
    last = 0 + 0.8 * after - before[1]
    first = 0.8 * before[1] - before[0] + 0.8 * 0.9 * last
    returns = weighted[0].value.returns[1]
    assert returns.tolist() == pytest.approx([first + before[0], last + before[1]], abs=1e-6)


def _distributions(decoder, one, temperature: float, critic):
    ids = torch.from_numpy(np.concatenate([one.prompt_ids, one.token_ids]).astype(np.int64))
    states = decoder(ids, torch.arange(len(ids)), PackedAttention(torch.tensor([0, len(ids)])))
    states = states[len(one.prompt_ids) - 1 : -1]
    return (decoder.logits(states) / temperature).log_softmax(-1), critic(states)


def test_row_chunks_do_not_change_deviation_and_uncertainty(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = random_groups(1)
    models = SignalModels(small_decoder(), small_decoder(seed=7))
    whole = compute_signals({"deviation", "uncertainty"}, groups, models, token_budget=1000)
    monkeypatch.setattr(signals, "CHUNK_ROWS", 7)
    parts = compute_signals({"deviation", "uncertainty"}, groups, models, token_budget=1000)
    for name, of_episodes in whole.items():
        for key, values in of_episodes.items():
            np.testing.assert_allclose(parts[name][key], values, atol=1e-6)


def test_compute_signals_rejects_duplicate_episode_ids() -> None:
    with pytest.raises(ValueError, match="same id"):
        compute_signals(
            {"logprobs"}, [[episode(), episode()]], SignalModels(small_decoder()), token_budget=10
        )


def test_compute_signals_names_the_missing_model() -> None:
    decoder = SignalModels(small_decoder())
    assert compute_signals(set(), [], decoder, token_budget=10) == {}
    with pytest.raises(RequestError, match="reference"):
        compute_signals({"deviation"}, [], decoder, token_budget=10)
    with pytest.raises(RequestError, match="critic"):
        compute_signals({"values"}, [], decoder, token_budget=10)


# Several updates of one batch.


def test_minibatches_split_live_and_dead_groups_evenly() -> None:
    groups = [WeightedGroup((), dead=dead) for dead in (True, False, True, False, False, False)]
    parts = minibatches(groups, 2)
    assert [[group.dead for group in part] for part in parts] == [[False, False, True]] * 2
    assert {id(group) for part in parts for group in part} == {id(group) for group in groups}
    assert minibatches([], 4) == [[]]
    assert len(minibatches(groups[:1], 4)) == 1


def test_merge_updates_weights_metrics_by_tokens() -> None:
    parts = [
        {"tokens": 10.0, "entropy": 1.0, "logprob_gap_max": 0.1},
        {"tokens": 30.0, "entropy": 2.0, "staleness_max": 1.0},
    ]
    assert merge_updates(parts) == {
        "tokens": 40, "entropy": 1.75, "logprob_gap_max": 0.1, "staleness_max": 1.0,
    }  # fmt: skip
    assert merge_updates(parts[:1]) == parts[0]
    assert merge_updates([{"tokens": 0.0, "lr": 2.0}] * 2) == {"tokens": 0, "lr": 2.0}
