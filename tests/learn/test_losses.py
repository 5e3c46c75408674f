"""Loss components against worked examples and float64 references, values and gradients."""

import math

import numpy as np
import pytest
import torch
from learning_cases import episode

from perilune.learn import losses
from perilune.learn.algorithms import algorithm
from perilune.learn.batch import pack
from perilune.learn.weights import Surrogate
from perilune.models.logprobs import token_logprobs


def policy_loss(ratio: float, weight: float, dual_clip: float | None = 3.0) -> tuple[float, float, bool]:
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    surrogate = Surrogate(low=0.8, high=1.28, dual=dual_clip)
    loss, clipped = losses.policy_gradient(logprob, torch.zeros(1), torch.tensor([weight]), surrogate)
    loss.backward()
    return loss.item(), logprob.grad.item(), bool(clipped)


@pytest.mark.parametrize(
    ("ratio", "weight", "loss", "clipped"),
    [
        (1.5, 1, -1.28, True),
        (1.5, -1, 1.5, False),
        (0.5, 1, -0.5, False),
        (0.5, -1, 0.8, True),
        (4, -1, 3, True),
    ],
)
def test_policy_gradient_worked_examples(ratio: float, weight: float, loss: float, clipped: bool) -> None:
    value, gradient, was_clipped = policy_loss(ratio, weight)
    assert value == pytest.approx(loss)
    assert was_clipped == clipped
    assert gradient == pytest.approx(0.0 if clipped else -ratio * weight)


def test_loss_without_dual_clip_is_the_ratio_for_negative_advantage() -> None:
    assert policy_loss(4, -1, dual_clip=None)[0] == pytest.approx(4)


def test_on_policy_gradient_equals_the_weight() -> None:
    for weight in (0.7, -0.7):
        assert policy_loss(1.0, weight)[:2] == pytest.approx((-weight, -weight))


def test_enormous_log_ratios_stay_finite() -> None:
    for gap in (1e4, -1e4):
        logprob = torch.tensor([gap], requires_grad=True)
        loss, _ = losses.policy_gradient(logprob, torch.zeros(1), torch.tensor([-1.0]), Surrogate())
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(logprob.grad).all()
        assert torch.isfinite(losses.k3(torch.tensor([gap]))).all()


def test_k3_worked_example() -> None:
    p, reference = (
        torch.tensor([0.6, 0.4], dtype=torch.float64),
        torch.tensor([0.5, 0.5], dtype=torch.float64),
    )
    x = (p / reference).log()
    kl = (p * x).sum().item()
    assert kl == pytest.approx(0.020136, abs=5e-7)
    assert (p * losses.k3(x)).sum().item() == pytest.approx(kl)
    assert (losses.k3(torch.linspace(-3, 3, 41)) >= 0).all()


def test_k2_worked_example() -> None:
    p = torch.tensor([0.6, 0.4], dtype=torch.float64)
    assert (p * losses.k2((p / 0.5).log())).sum().item() == pytest.approx(0.019931, abs=5e-7)


def test_k2_gradient_equals_reverse_kl_gradient() -> None:
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    logp = logits.log_softmax(0)
    sampled = losses.reference_kl(logp, reference.log(), logp.detach().exp(), "k2")
    (gradient,) = torch.autograd.grad(sampled, logits, retain_graph=True)
    reverse_kl = (logp.exp() * (logp - reference.log())).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(reverse_kl, logits)[0])


def test_sequence_ratio_is_the_geometric_mean_of_token_ratios() -> None:
    logprobs = torch.tensor([0.2, -0.1, 0.05, 0.7], dtype=torch.float64, requires_grad=True)
    surrogate = Surrogate(ratio="sequence", low=0.5, high=1.5)
    weights, episode_of = torch.tensor([1.0, 2.0, 3.0, 1.0]).double(), torch.tensor([0, 0, 0, 1])
    old = torch.zeros(4, dtype=torch.float64)
    loss, clipped = losses.policy_gradient(logprobs, old, weights, surrogate, episode_of)
    loss.backward()
    assert loss.item() == pytest.approx(-(6 * 1.0513 + 1.5), abs=4e-4)
    assert clipped.tolist() == [False, False, False, True]
    assert logprobs.grad.tolist() == pytest.approx([-1.05127, -2 * 1.05127, -3 * 1.05127, 0], abs=2e-5)


@pytest.mark.parametrize(
    ("ratio", "weight", "gradient", "bounded"),
    [(1.5, 1, -1.28, True), (1.5, -1, 1.28, True), (0.5, 1, -0.8, True), (1.1, -2, 2.2, False)],
)
def test_weight_clipping_keeps_the_gradient(
    ratio: float, weight: float, gradient: float, bounded: bool
) -> None:
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    loss, was = losses.policy_gradient(
        logprob, torch.zeros(1), torch.tensor([float(weight)]), Surrogate(clip="weight")
    )
    loss.backward()
    assert logprob.grad.item() == pytest.approx(gradient)
    assert loss.item() == pytest.approx(gradient * math.log(ratio))
    assert bool(was) == bounded


@pytest.mark.parametrize(
    ("value", "loss", "gradient"),
    [(0.1, 0.405, -0.9), (0.5, 0.32, 0.0), (-0.4, 0.98, -1.4), (2.0, 0.5, 1.0)],
)
def test_value_loss_is_clipped_worked_examples(value: float, loss: float, gradient: float) -> None:
    """The return is 1, the old value 0 and the clip range 0.2."""
    predicted = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    none, one = torch.zeros(1).double(), torch.ones(1).double()
    found = losses.value(predicted, none, one, one, clip=0.2)
    found.backward()
    assert found.item() == pytest.approx(loss)
    assert predicted.grad.item() == pytest.approx(gradient)


def test_k3_gradient_equals_forward_kl_gradient() -> None:
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    logp = logits.log_softmax(0)
    sampled = losses.reference_kl(logp, reference.log(), logp.detach().exp())
    (gradient,) = torch.autograd.grad(sampled, logits, retain_graph=True)
    forward_kl = (reference * (reference.log() - logp)).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(forward_kl, logits)[0])


def test_corrected_k3_gradient_equals_reverse_kl_gradient_off_policy() -> None:
    """The mean over samples from another policy: plain k3 and k2 have a different gradient there."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    reference, sampler = (torch.tensor(p, dtype=torch.float64) for p in ([0.2, 0.3, 0.5], [0.6, 0.3, 0.1]))
    logp = logits.log_softmax(0)
    reverse_kl = (logp.exp() * (logp - reference.log())).sum()
    right = torch.autograd.grad(reverse_kl, logits, retain_graph=True)[0]

    def gradient(estimator: str) -> torch.Tensor:
        loss = losses.reference_kl(logp, reference.log(), sampler, estimator, sampler.log())
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    torch.testing.assert_close(gradient("k3_corrected"), right)
    assert all((gradient(other) - right).norm() > 0.1 * right.norm() for other in ("k2", "k3"))


def test_corrected_k3_equals_the_formula_of_trl() -> None:
    """per_token_kl * coef_1, with coef_1 = exp(logp - old), and the gradient through both."""
    torch.manual_seed(1)
    old, reference, weights = (torch.randn(20, dtype=torch.float64) for _ in range(3))
    logp = torch.randn(20, dtype=torch.float64, requires_grad=True)
    kl = torch.exp(reference - logp) - (reference - logp) - 1
    theirs = (weights * kl * torch.exp(logp - old)).sum()
    ours = losses.reference_kl(logp, reference, weights, "k3_corrected", old)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    expected = torch.autograd.grad(theirs, logp)[0]
    torch.testing.assert_close(torch.autograd.grad(ours, logp)[0], expected, rtol=1e-6, atol=1e-12)


def test_rloo_with_sequence_product_ratio_has_the_gradient_of_trl() -> None:
    """TRL: -mean over answers of min(c A, clip(c) A), c = exp(sum of log-ratios). Ours is 1/C of it."""
    rng = np.random.default_rng(2)
    lengths, rewards, constant = [3, 5, 2, 4], [1.0, 0.0, 0.0, 1.0], 8
    advantages = [1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3]
    old = [rng.normal(-2, 0.3, length) for length in lengths]
    group = [
        episode(r, tokens=[4] * n, logprobs=o, name=f"0/0/{i}")
        for i, (r, n, o) in enumerate(zip(rewards, lengths, old, strict=True))
    ]
    new = [torch.tensor(o + rng.normal(0, 0.3, len(o)), requires_grad=True) for o in old]
    terms = []
    for now, before, advantage in zip(new, old, advantages, strict=True):
        ratio = torch.exp(now.sum() - before.sum())
        terms.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    theirs = torch.autograd.grad(torch.stack(terms).mean(), new)
    assert any(g.any() for g in theirs) and not all(g.any() for g in theirs)  # some are clipped

    def ours(ratio: str) -> torch.Tensor:
        rloo = algorithm("rloo", ratio=ratio, clip_high=0.2)
        (batch,) = pack([rloo(group, max_tokens=constant)], 100)
        logprobs = torch.cat(new)
        loss, _ = losses.policy_gradient(
            logprobs, batch.old_logprobs, batch.policy_gradient, batch.surrogate, batch.episode_of
        )
        return torch.cat(torch.autograd.grad(loss, new)) * constant

    torch.testing.assert_close(ours("sequence-product"), torch.cat(theirs), rtol=1e-6, atol=1e-8)
    assert (ours("token") - torch.cat(theirs)).norm() > 0.3 * torch.cat(theirs).norm()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropy_and_its_gradient(temperature: float) -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, 11, dtype=torch.float32, requires_grad=True)
    exact = logits.detach().double().requires_grad_()
    plain = torch.distributions.Categorical(logits=exact / temperature).entropy()
    found = losses.entropy(logits, temperature)
    torch.testing.assert_close(found, plain.float(), rtol=1e-6, atol=1e-6)
    found.sum().backward()
    plain.sum().backward()
    torch.testing.assert_close(logits.grad, exact.grad.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_equal_a_float64_reference(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(50, 31, requires_grad=True)
    targets, weights = torch.randint(0, 31, (50,)), torch.randn(50)
    chosen, entropy = token_logprobs(logits, targets, temperature)
    (chosen * weights).sum().backward()

    exact = logits.detach().double().requires_grad_()
    logp = (exact / temperature).log_softmax(1)
    expected = logp[torch.arange(50), targets]
    (expected * weights).sum().backward()
    torch.testing.assert_close(chosen, expected.float(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropy, -(logp.exp() * logp).sum(1).float(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(logits.grad, exact.grad.float(), atol=1e-6, rtol=1e-5)
    assert not entropy.requires_grad


def test_token_logprobs_does_not_modify_logits() -> None:
    logits = torch.randn(4, 5)
    before = logits.clone()
    token_logprobs(logits, torch.zeros(4, dtype=torch.int64))
    assert torch.equal(logits, before)
