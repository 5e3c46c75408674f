"""Distillation losses and diagnostics against worked examples and float64 references."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_cases import VOCABULARY, episode, plain_logprobs, small_decoder
from preference_cases import random_pairs

from perilune.errors import RequestError
from perilune.learn import distillation
from perilune.learn.distillation import (
    Distillation,
    diagnostics,
    distill,
    forward_topk,
    generalized_jsd,
    reverse_topk,
    split_chunks,
    token_losses,
)
from perilune.learn.trainer import Learner
from perilune.models import logprobs
from perilune.models.attention import PackedAttention
from perilune.models.decoder import Decoder
from perilune.models.logprobs import log_distribution
from perilune.models.memory import DISTILLATION_ROW

# Tokens 1 to 4 of the worked example, and two tokens with the remaining probability mass.
P = torch.tensor([[0.6, 0.3, 0.05, 0.02, 0.016, 0.014]], dtype=torch.float64).log()
Q = torch.tensor([[0.4, 0.4, 0.04, 0.1, 0.035, 0.025]], dtype=torch.float64).log()
FIRST = torch.zeros(1, dtype=torch.int64)


def figures(k: int = 3) -> dict[str, float]:
    return {name: float(value) for name, value in diagnostics(P, Q, FIRST, k)._asdict().items()}


def test_diagnostics_worked_example() -> None:
    found = figures()
    assert found["overlap_ratio"] == pytest.approx(0.6667, abs=5e-5)
    assert found["overlap_mass_student"] == pytest.approx(0.9)
    assert found["overlap_mass_teacher"] == pytest.approx(0.8)
    assert found["overlap_advantage"] == pytest.approx(-0.02832, abs=5e-6)
    assert found["overlap_advantage_verl"] == pytest.approx(0.02356, abs=5e-6)
    assert found["entropy_gap_topk"] == pytest.approx(0.15576, abs=5e-6)
    assert found["topk_mass_student"] == pytest.approx(0.92)
    assert found["topk_mass_teacher"] == pytest.approx(0.9)
    assert found["reverse_kl"] == pytest.approx(math.log(0.6 / 0.4))
    full = [-(x.exp() * x).sum().item() for x in (P, Q)]
    assert found["entropy_gap"] == pytest.approx(abs(full[0] - full[1]))


def test_forward_topk_worked_example() -> None:
    assert forward_topk(P, Q, 3).item() == pytest.approx(0.11383, abs=5e-6)


def test_forward_topk_is_clamped_at_zero() -> None:
    p, q = torch.tensor([[0.7, 0.3]]).log(), torch.tensor([[0.6, 0.4]]).log()
    assert forward_topk(p, q, 1).item() == 0.0  # 0.6 log(0.6 / 0.7) is negative
    assert forward_topk(p, q, 2).item() > 0


@pytest.mark.parametrize(("beta", "expected"), [(0.001, 0.000184), (0.0, 0.18379)])
def test_gkd_is_forward_kl_at_beta_0_and_reverse_kl_at_beta_1(beta: float, expected: float) -> None:
    q, p = (torch.tensor([[a, 1 - a]], dtype=torch.float64).log() for a in (0.7, 0.4))
    assert generalized_jsd(p, q, beta).item() == pytest.approx(expected, abs=5e-7 if beta else 5e-6)
    reverse = 0.4 * math.log(0.4 / 0.7) + 0.6 * math.log(0.6 / 0.3)
    assert generalized_jsd(p, q, 1.0).item() == pytest.approx(reverse)
    half = sum(
        0.5 * a * math.log(a / m) + 0.5 * b * math.log(b / m)
        for a, b, m in ((0.7, 0.4, 0.55), (0.3, 0.6, 0.45))
    )
    assert generalized_jsd(p, q, 0.5).item() == pytest.approx(half)


def test_gkd_rejects_beta_above_1() -> None:
    with pytest.raises(RequestError, match="beta"):
        generalized_jsd(P, Q, 1.5)


def test_overlap_advantage_is_negative_kl_over_shared_top_tokens() -> None:
    torch.manual_seed(0)
    p, q = (torch.randn(40, 30, dtype=torch.float64).mul(2).log_softmax(-1) for _ in range(2))
    by_token = diagnostics(p, q, torch.zeros(40, dtype=torch.int64), 5)._asdict()
    found = {name: values.sum() for name, values in by_token.items()}
    total, count, overlaps = 0.0, 0, []
    for a, b in zip(p.exp().numpy(), q.exp().numpy(), strict=True):
        both = sorted(set(np.argsort(-a)[:5]) & set(np.argsort(-b)[:5]))
        overlaps.append(len(both) / 5)
        if both:
            x, y = a[both] / a[both].sum(), b[both] / b[both].sum()
            total -= float((x * np.log(x / y)).sum()) / len(both)
            count += 1
    assert 0 < count < 40  # tokens without overlap are excluded from the mean
    assert found["overlap_tokens"].item() == count
    assert found["overlap_advantage"].item() == pytest.approx(total)
    assert found["overlap_ratio"].item() == pytest.approx(sum(overlaps))
    assert total < 0


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 40))
def test_diagnostics_and_losses_are_zero_for_equal_policies(seed: int, k: int) -> None:
    p = torch.randn(6, 23, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).log_softmax(-1)
    by_token = diagnostics(p, p, torch.zeros(6, dtype=torch.int64), k)._asdict()
    found = {name: values.sum() for name, values in by_token.items()}
    assert found["overlap_ratio"].item() == pytest.approx(6)
    for name in (
        "overlap_advantage",
        "overlap_advantage_verl",
        "entropy_gap",
        "entropy_gap_topk",
        "reverse_kl",
    ):
        assert found[name].item() == pytest.approx(0, abs=1e-12)
    for loss in (forward_topk(p, p, k), reverse_topk(p, p, k), generalized_jsd(p, p, 0.5)):
        assert loss.abs().max().item() == pytest.approx(0, abs=1e-12)


def test_reverse_topk_renormalizes_student_and_teacher() -> None:
    logits = P.clone().requires_grad_()
    value = reverse_topk(logits.log_softmax(-1), Q, 3)
    a = np.array([0.6, 0.3, 0.05]) / 0.95
    b = np.array([0.4, 0.4, 0.04]) / 0.84
    assert value.item() == pytest.approx(float((a * np.log(a / b)).sum()))
    value.backward()
    # d KL / d logit_i = a_i (log a_i / b_i - KL) on the top three, nothing elsewhere
    expected = a * (np.log(a / b) - value.item())
    np.testing.assert_allclose(logits.grad[0, :3].numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(logits.grad[0, 3:].numpy(), 0, atol=1e-12)


def test_reverse_kl_gradient_is_the_log_ratio_to_the_teacher() -> None:
    old = torch.tensor([math.log(0.6)], dtype=torch.float64)
    gradients = []
    for q in (P, Q):
        p = P.clone().requires_grad_()
        loss = token_losses(p, q, FIRST, old, torch.zeros(1), Distillation("reverse_kl"))
        (gradient,) = torch.autograd.grad(loss.sum(), p)
        gradients.append(gradient[0, 0].item())
    assert gradients[0] == pytest.approx(0)  # equal student and teacher
    assert gradients[1] == pytest.approx(math.log(0.6 / 0.4))  # -A: A is treated as a constant


def test_task_advantage_is_added_to_teacher_advantage() -> None:
    p = P.clone().requires_grad_()
    loss = token_losses(
        p, Q, FIRST, torch.tensor([math.log(0.6)], dtype=torch.float64), torch.tensor([2.0]),
        Distillation("reverse_kl", coefficient=0.5),
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss.sum(), p)
    assert gradient[0, 0].item() == pytest.approx(-(2.0 - 0.5 * math.log(0.6 / 0.4)))


def distributions(decoder, prompt, tokens) -> torch.Tensor:
    """Log-probs [T, V] over the vocabulary, from a forward pass over one sequence."""
    ids = torch.tensor([*prompt, *tokens])
    logits = decoder.logits(
        decoder(ids, torch.arange(len(ids)), PackedAttention(torch.tensor([0, len(ids)])))
    )
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def reference(student, teacher, episodes, prompts, loss: Distillation, advantages) -> torch.Tensor:
    """The loss of a step from its definition, one token at a time."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for answer, prompt, gain in zip(episodes, prompts, advantages, strict=True):
        p = distributions(student, answer.prompt_ids.tolist(), answer.token_ids.tolist())
        q = distributions(teacher, prompt, answer.token_ids.tolist()).detach()
        for t in np.flatnonzero(answer.loss_mask):
            a, b, token = p[t], q[t], int(answer.token_ids[t])
            if loss.kind == "reverse_kl":
                advantage = gain - loss.coefficient * (float(answer.logprobs[t]) - b[token].item())
                total = total - torch.exp(a[token] - float(answer.logprobs[t])) * advantage
            elif loss.kind == "forward_topk":
                best = b.argsort(descending=True)[: loss.k]
                total = total + torch.relu((b[best].exp() * (b[best] - a[best])).sum())
            elif loss.kind == "reverse_topk":
                best = a.argsort(descending=True)[: loss.k]
                x, y = a[best].exp() / a[best].exp().sum(), b[best].exp() / b[best].exp().sum()
                total = total + (x * (x / y).log()).sum()
            else:
                m = loss.beta * b.exp() + (1 - loss.beta) * a.exp()
                total = total + loss.beta * (b.exp() * (b - m.log())).sum()
                total = total + (1 - loss.beta) * (a.exp() * (a - m.log())).sum()
            tokens += 1
    return total / tokens


@pytest.mark.parametrize("kind", ["reverse_kl", "reverse_topk", "forward_topk", "gkd"])
@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_distillation_step_equals_float64_reference_at_every_token_budget_and_chunk_size(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        distillation,
        "log_distribution",
        lambda logits, t: seen.append(len(logits)) or log_distribution(logits, t),
    )
    monkeypatch.setattr(logprobs, "MAX_LOGITS_PER_CHUNK", rows * DISTILLATION_ROW * VOCABULARY)
    never_began = episode(failure="environment: it did not open", tokens=(), name="0/9/0")
    episodes = [never_began, *(answer for pair in random_pairs(3, 3) for answer in pair)]
    hint = [7, 7, 2]
    prompts = [[*hint, *answer.prompt_ids.tolist()] for answer in episodes]
    gains = [0.0, 0.5, -0.5, 0.0, 0.0, 1.0, -1.0]
    loss = Distillation(kind, k=4, beta=0.3)
    exact, teacher = small_decoder(1, torch.float64), small_decoder(2, torch.float64)
    expected = reference(exact, teacher, episodes, prompts, loss, gains)
    expected.backward()
    tokens = sum(int(answer.loss_mask.sum()) for answer in episodes)
    for budget in (10_000, 25, 1):
        learner = Learner(small_decoder(1))
        parts = list(split_chunks(episodes, prompts, budget, advantages=gains))
        assert (len(parts) == 1) == (budget == 10_000)
        found = distill(learner, small_decoder(2), iter(parts), loss, tokens)
        assert found["loss"] == pytest.approx(expected.item(), rel=1e-4)
        assert found["tokens"] == tokens
        for parameter, other in zip(learner.decoder.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.double(), other.grad, rtol=3e-3, atol=3e-5)
    assert max(seen) <= rows


def test_distillation_from_equal_weights_and_prompt_has_zero_loss() -> None:
    """Fails when teacher and student tokens are misaligned or truncated."""
    episodes = [answer for pair in random_pairs(5, 4) for answer in pair]
    decoder = small_decoder(4)
    prompts = [answer.prompt_ids.tolist() for answer in episodes]
    tokens = sum(int(answer.loss_mask.sum()) for answer in episodes)
    found = distill(
        Learner(decoder), decoder, split_chunks(episodes, prompts, 30), Distillation("gkd"), tokens
    )
    assert found["reverse_kl"] == pytest.approx(0, abs=1e-6)
    assert found["loss"] == pytest.approx(0, abs=1e-6)
    assert found["overlap_ratio"] == pytest.approx(1)


def test_teacher_scores_tokens_after_its_own_prompt() -> None:
    one = episode(0.0, prompt=(1, 2), tokens=(3, 4, 5), logprobs=(0.0, 0.0, 0.0))
    student, teacher = small_decoder(1), small_decoder(2)
    found = distill(Learner(student), teacher, split_chunks([one], [[9, 1, 2]], 100), Distillation("gkd"), 3)
    with_system = dataclasses.replace(one, prompt_ids=np.array([9, 1, 2], np.int32))
    expected = (plain_logprobs(student, one) - plain_logprobs(teacher, with_system)).mean().item()
    assert found["reverse_kl"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", ["reverse_kl", "reverse_topk", "forward_topk", "gkd"])
def test_padding_of_either_vocabulary_changes_nothing(kind: str) -> None:
    """Qwen2.5 models of 0.5B and 7B parameters have 151,936 and 152,064 rows for the same tokens."""
    one, loss = episode(0.0, prompt=(1, 2), tokens=(3, 4, 5)), Distillation(kind, k=3)

    def step(student: Decoder, teacher: Decoder) -> dict[str, float]:
        return distill(Learner(student), teacher, split_chunks([one], [[1, 2]], 100), loss, 3)

    expected = step(small_decoder(1), small_decoder(2))
    assert step(small_decoder(1), padded(small_decoder(2))) == pytest.approx(expected, rel=1e-5)
    assert step(padded(small_decoder(1)), small_decoder(2)) == pytest.approx(expected, rel=1e-5)


def padded(decoder: Decoder) -> Decoder:
    """The decoder with two more rows in its vocabulary."""
    wider = Decoder(decoder.config.replace(vocab_size=VOCABULARY + 2))
    wider.initialize(5)
    with torch.no_grad():
        for name, parameter in wider.named_parameters():
            source = decoder.get_parameter(name)
            parameter[: len(source)] = source
    return wider


def test_temperature_applies_to_student_and_teacher() -> None:
    one = episode(0.0, prompt=(1, 2), tokens=(3, 4), logprobs=(0.0, 0.0))
    student, teacher = small_decoder(1), small_decoder(2)
    loss = Distillation("gkd", beta=1.0, temperature=0.5)
    found = distill(Learner(student), teacher, split_chunks([one], [[1, 2]], 100, temperature=0.5), loss, 2)
    p, q = (distributions(model, [1, 2], [3, 4]) for model in (student, teacher))
    p, q = (x.mul(2).log_softmax(-1) for x in (p, q))
    assert found["loss"] == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-4)


def test_forward_topk_with_k_above_vocabulary_uses_all_tokens() -> None:
    p = torch.randn(3, VOCABULARY).log_softmax(-1)
    q = torch.randn(3, VOCABULARY).log_softmax(-1)
    full = (q.exp() * (q - p)).sum(-1)
    torch.testing.assert_close(forward_topk(p, q, 1000), full)
