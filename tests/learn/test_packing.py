"""Packing: loss and gradient equal their definition and do not depend on batch boundaries."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_cases import (
    episode,
    plain_logprobs,
    plain_loss,
    random_groups,
    small_critic,
    small_decoder,
    weighted_groups,
)

from perilune.errors import RequestError, WorkFailedError
from perilune.learn import batch, trainer
from perilune.learn.algorithms import ALGORITHMS, algorithm
from perilune.learn.batch import pack, round_up_rows
from perilune.learn.trainer import Learner, add_reference_logprobs, token_logprobs
from perilune.learn.weights import WeightedGroup


def random_weighted(name: str, seed: int, kl: float = 0.0, **shape: int) -> list[WeightedGroup]:
    return weighted_groups(name, random_groups(seed, **shape), kl)


def gradient_of(groups: list[WeightedGroup], budget: int, dtype=torch.float64, reference=None):
    decoder = small_decoder(dtype=dtype)
    learner = Learner(decoder, critic=small_critic(decoder))
    batches = pack(groups, budget)
    if reference is not None:
        batches = add_reference_logprobs(batches, reference)
    figures = learner.forward_backward(batches)
    return figures, {n: p.grad for n, p in learner.optimizer.parameters.items()}


WIDE = {"clip_low": 0.999, "clip_high": 1e6}


@pytest.mark.parametrize(
    ("name", "options"),  # one of each kind of token loss, aggregation and token weight
    [
        ("grpo", {}),
        ("grpo", {"kl": 0.05}),
        ("grpo", {"kl": 0.05, "kl_estimator": "k2"}),
        ("grpo", {"kl": 0.05, "kl_estimator": "k3_corrected"}),
        ("dr_grpo", {"kl": 0.05, "entropy_bonus": 0.1}),
        ("rloo", WIDE),
        ("rloo", WIDE | {"ratio": "sequence-product"}),
        ("rloo", {"ratio": "sequence-product"}),
        ("gspo", {"kl": 0.05}),
        ("cispo", {}),
        ("ppo", {}),
        ("dgpo", {}),
        ("sft", {"kl": 0.05}),
    ],
)
def test_loss_and_gradient_equal_the_definition(name: str, options: dict) -> None:
    groups = weighted_groups(name, random_groups(3, groups=3, size=5, longest=5), **options)
    reference = small_decoder(seed=9, dtype=torch.float64)
    figures, gradients = gradient_of(groups, 16, reference=reference)
    decoder = small_decoder(dtype=torch.float64)
    critic = small_critic(decoder)
    expected = plain_loss(decoder, groups, reference=reference, critic=critic)
    expected.backward()
    assert figures["loss"] == pytest.approx(expected.item(), rel=2e-6)
    for parameter_name, parameter in decoder.named_parameters():
        torch.testing.assert_close(gradients[parameter_name], parameter.grad, rtol=2e-5, atol=2e-7)
    if name == "ppo":
        torch.testing.assert_close(
            gradients["critic.head.weight"], critic.head.weight.grad, rtol=2e-5, atol=2e-7
        )


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(list(ALGORITHMS)), st.integers(1, 60), st.randoms())
def test_loss_and_gradient_do_not_depend_on_token_budget_or_group_order(
    seed: int, name: str, budget: int, shuffler
) -> None:
    groups = random_weighted(name, seed)
    whole, expected = gradient_of(groups, 10_000)
    shuffler.shuffle(groups)
    cut, gradients = gradient_of(groups, budget)
    assert cut["tokens"] == whole["tokens"]
    assert cut["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    assert cut.get("entropy") == pytest.approx(whole.get("entropy"))
    for parameter, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(gradients[parameter], gradient, rtol=1e-6, atol=1e-7)


def test_micro_batches_respect_token_budget_and_keep_groups_together() -> None:
    groups = random_weighted("sft", seed=1, groups=8, size=4)
    batches = pack(groups, 40)
    assert all(len(batch.token_ids) <= 40 for batch in batches)
    assert sum(int((batch.prefix_of < 0).sum()) for batch in batches) == 8
    assert sum(int((batch.prefix_of >= 0).sum()) for batch in batches) == 32


def test_packed_batch_has_each_prompt_once_and_no_last_tokens() -> None:
    group = [episode(float(i), prompt=[1, 2, 3], tokens=[4, 5 + i, 6], name=f"0/0/{i}") for i in range(2)]
    (batch,) = pack([algorithm("grpo")(group, max_tokens=4)], 100)
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 4, 6]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 3, 4]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 7]
    assert batch.prefix_of.tolist() == [-1, 0, 0]
    assert batch.rows.tolist() == [2, 3, 4, 2, 5, 6]
    assert batch.targets.tolist() == [4, 5, 6, 4, 6, 6]


def test_overlong_episode_gets_its_own_micro_batch() -> None:
    group = [episode(float(i), tokens=[1] * 50) for i in range(2)]
    assert len(pack([algorithm("grpo")(group, max_tokens=50)], 10)) == 2


def test_single_token_answers_add_no_completion_tokens_to_batch() -> None:
    group = [episode(float(i), tokens=[4 + i]) for i in range(2)]
    groups = [algorithm("grpo")(group, max_tokens=4)]
    (batch,) = pack(groups, 100)
    assert len(batch.token_ids) == 3
    expected = torch.stack([plain_logprobs(small_decoder(), answer)[0] for answer in group])
    torch.testing.assert_close(token_logprobs(small_decoder(), batch), expected.detach())


def test_dead_groups_are_not_packed_but_count_in_the_denominator() -> None:
    live = [episode(float(i * i), tokens=[4, 5 + i], name=f"0/0/{i}") for i in range(3)]
    dead = [episode(1.0, prompt=[7], tokens=[4, 5 + i], name=f"0/1/{i}") for i in range(3)]
    groups = [algorithm("grpo")(group, max_tokens=4) for group in (live, dead)]
    batches = pack(groups, 1000)
    assert sum(len(batch.targets) for batch in batches) == 6
    figures, gradients = gradient_of(groups, 1000)
    decoder = small_decoder(dtype=torch.float64)
    loss = torch.zeros(())
    for group in groups:  # including dead groups, whose advantages are zero
        for answer, weights in zip(group.episodes, group.policy_gradient.weights, strict=True):
            ratio = torch.exp(plain_logprobs(decoder, answer) - torch.from_numpy(answer.logprobs))
            weight = torch.from_numpy(weights)
            loss = loss - torch.min(ratio * weight, ratio.clamp(0.8, 1.28) * weight).sum() / 12
    loss.backward()
    assert figures["loss"] == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=2e-5, atol=1e-7)


def test_step_with_only_dead_groups_changes_no_weights() -> None:
    groups = [algorithm("grpo")([episode(1.0), episode(1.0)], max_tokens=4)]
    learner = Learner(small_decoder())
    before = {n: p.clone() for n, p in learner.decoder.named_parameters()}
    assert learner.forward_backward(pack(groups, 100)) == {"loss": 0.0, "tokens": 0.0}
    assert learner.optim_step(1e-2)["grad_norm"] == 0
    assert all(torch.equal(before[n], p) for n, p in learner.decoder.named_parameters())


def test_packed_logprobs_equal_those_of_each_sequence_alone() -> None:
    decoder = small_decoder()
    groups = random_weighted("sft", seed=5)
    found = torch.cat([token_logprobs(decoder, batch) for batch in pack(groups, 30)])
    expected = torch.cat([
        plain_logprobs(decoder, answer)[torch.from_numpy(answer.loss_mask)]
        for group in groups
        for answer in group.episodes
    ])  # fmt: skip
    torch.testing.assert_close(found, expected.detach(), atol=1e-6, rtol=3e-7)


def test_temperature_divides_the_logits() -> None:
    groups = random_weighted("sft", seed=5, groups=1)
    decoder = small_decoder()
    (batch,) = pack(groups, 1000, temperature=0.5)
    (plain,) = pack(groups, 1000)
    with torch.no_grad():
        decoder.model.norm.weight.mul_(2)  # logits twice as large
    hot = token_logprobs(decoder, plain)
    with torch.no_grad():
        decoder.model.norm.weight.div_(2)
    torch.testing.assert_close(token_logprobs(decoder, batch), hot)


def test_pack_rejects_empty_prompt() -> None:
    groups = [algorithm("sft")([episode(prompt=[], name="5/0/1")], max_tokens=4)]
    with pytest.raises(WorkFailedError, match="5/0/1 has an empty prompt"):
        pack(groups, 100)


def test_reference_kl_without_reference_logprobs_is_rejected() -> None:
    learner = Learner(small_decoder())
    with pytest.raises(RequestError, match="no reference log-probs"):
        learner.forward_backward(pack(random_weighted("grpo", 3, kl=0.1), 100))


def test_reference_kl_to_equal_weights_has_zero_loss_and_gradient() -> None:
    groups = [replace(g, policy_gradient=None) for g in random_weighted("grpo", 3, kl=0.1)]
    figures, gradients = gradient_of(groups, 100, reference=small_decoder(dtype=torch.float64))
    assert figures["kl_reference"] == pytest.approx(0, abs=1e-12)
    assert all(g.abs().max() < 1e-7 for g in gradients.values() if g is not None)


def test_metrics_report_logprob_gap_and_staleness() -> None:
    decoder = small_decoder()
    groups = random_groups(2)
    exact = [
        [
            replace(answer, logprobs=plain_logprobs(decoder, answer).detach().numpy() + np.float32(0.25))
            for answer in group
        ]
        for group in groups
    ]
    learner = Learner(decoder)
    batches = pack([algorithm("grpo")(group, max_tokens=8) for group in exact], 20)
    figures = learner.forward_backward(batches)
    assert figures["logprob_gap_max"] == pytest.approx(0.25, abs=1e-5)
    assert figures["logprob_gap_mean"] == pytest.approx(0.25, abs=1e-5)
    assert figures["kl_behaviour"] == pytest.approx(0.25, abs=1e-5)
    assert figures["kl_behaviour_k3"] == pytest.approx(np.exp(-0.25) - 0.75, abs=1e-5)
    assert figures["staleness"] == 0
    learner.optim_step(1e-3)
    later = learner.forward_backward(batches)
    assert later["staleness"] == 1
    assert "logprob_gap_max" not in later


def test_round_up_limits_the_number_of_batch_shapes() -> None:
    assert [round_up_rows(n) for n in (1, 2, 3, 17, 255, 256, 257, 512, 4081)] == [
        1, 2, 4, 32, 256, 256, 512, 512, 4096,
    ]  # fmt: skip


@pytest.mark.parametrize("budget", [15, 40, 10_000])
def test_padding_tokens_belong_to_no_episode(budget: int) -> None:
    for plain in pack(random_weighted("grpo", seed=8, groups=6), budget):
        padded = plain.padded()
        real = len(plain.token_ids)
        assert len(padded.token_ids) == len(padded.positions) == padded.cu_seqlens[-1] == round_up_rows(real)
        assert len(padded.cu_seqlens) == len(padded.prefix_of) + 1
        assert padded.cu_seqlens.diff().min() >= 0
        assert padded.token_ids[:real].tolist() == plain.token_ids.tolist()
        own = padded.prefix_of[len(plain.prefix_of) :]
        assert (own == -1).all()
        assert (
            padded.cu_seqlens.diff()[len(plain.prefix_of) :] <= 16
        ).all()  # padding does not widen any attention block
        assert padded.rows.max() < real
        assert padded.targets.tolist() == plain.targets.tolist()


@pytest.mark.parametrize("name", ["grpo", "gspo", "ppo"])
def test_padding_changes_no_metric_and_no_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = random_weighted(name, seed=8, groups=6)
    figures, gradients = gradient_of(groups, 50)
    monkeypatch.setattr(batch, "round_up_rows", lambda rows: rows)
    monkeypatch.setattr(trainer, "round_up_rows", lambda rows: rows)
    plain, expected = gradient_of(groups, 50)
    assert figures == pytest.approx(plain, rel=1e-6)
    for parameter, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(gradients[parameter], gradient, rtol=1e-6, atol=1e-8)
