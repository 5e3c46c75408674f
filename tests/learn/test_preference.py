"""DPO and IPO losses and gradients against float64 references; collapse metrics and pair packing."""

import dataclasses
from itertools import zip_longest

import numpy as np
import pytest
import torch
from learning_cases import episode, plain_logprobs, small_decoder
from preference_cases import random_pairs
from torch import nn

from perilune.errors import RequestError
from perilune.learn.batch import pack_pairs
from perilune.learn.distributed import Ranks
from perilune.learn.preference import (
    PairLogprobs,
    PreferenceObjective,
    add_reference_to_pairs,
    is_collapsing,
    pair_figures,
    preference_loss,
)
from perilune.learn.trainer import Learner
from perilune.learn.training_settings import OptimizerSettings


def shifted(chosen: float, rejected: float, length: float = 10.0) -> tuple[PairLogprobs, torch.Tensor]:
    """A pair with the given log-prob shifts from the reference, and the leaf tensor of both shifts."""
    leaf = torch.tensor([chosen, rejected], dtype=torch.float64, requires_grad=True)
    zero, lengths = torch.zeros(1, dtype=torch.float64), torch.full((1,), length, dtype=torch.float64)
    return PairLogprobs(leaf[:1], leaf[1:], zero, zero, lengths, lengths), leaf


@pytest.mark.parametrize(
    ("shifts", "loss", "weight"), [((2.0, -1.0), 0.55436, 0.04256), ((-5.0, -20.0), 0.20141, None)]
)
def test_dpo_worked_examples(shifts: tuple[float, float], loss: float, weight: float | None) -> None:
    pairs, leaf = shifted(*shifts)
    losses, margin = preference_loss(pairs, "dpo", 0.1)
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss, abs=5e-6)
    if weight is not None:
        assert leaf.grad.tolist() == pytest.approx([-weight, weight], abs=5e-6)
    assert margin.item() > 0


def test_falling_chosen_reward_with_growing_margin_reports_collapse() -> None:
    # Ten tokens each, shifts -5 (chosen) and -20 (rejected): accuracy 1, but chosen loses 0.5 nats per token.
    seen = np.array([[1.5], [-5.0], [-20.0], [10.0], [10.0], [-20.0]])
    figures = pair_figures(seen, beta=0.1)
    assert figures["accuracy"] == 1.0
    assert figures["reward_chosen"] == pytest.approx(-0.5)
    assert figures["chosen_below"] == 1.0
    assert figures["collapse"] == 1.0
    assert is_collapsing(-0.051, 0.1)
    assert not is_collapsing(-0.049, 0.1)
    assert not is_collapsing(-1.0, -0.1)  # margins shrink: not the collapse that this metric detects


def test_healthy_pairs_report_no_collapse() -> None:
    seen = np.array([[1.5, 0.2], [5.0, 1.0], [-10.0, -1.0], [10.0, 8.0], [10.0, 4.0], [-8.0, -3.0]])
    figures = pair_figures(seen, beta=0.1)
    assert (figures["collapse"], figures["chosen_below"]) == (0.0, 0.0)
    assert figures["chosen_nll"] == pytest.approx((0.8 + 0.375) / 2)
    assert figures["length_correlation"] == pytest.approx(-1.0)  # 0 and 4 tokens longer, margins 1.5 and 0.2


def test_length_correlation_is_omitted_for_equal_lengths() -> None:
    seen = np.array([[1.0, 2.0], [1.0, 1.0], [0.0, 0.0], [3.0, 3.0], [3.0, 3.0], [-1.0, -1.0]])
    assert "length_correlation" not in pair_figures(seen, beta=0.1)


def reference_loss(decoder: nn.Module, pairs: list, kind: str, beta: float, nll: float, dpop: float):
    """Each loss from its formula in float64, one pair and one sequence at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for chosen, rejected in pairs:
        sums, shifts, lengths = [], [], []
        for answer in (chosen, rejected):
            mask = torch.from_numpy(answer.loss_mask)
            now = plain_logprobs(decoder, answer)[mask]
            sums.append(now.sum())
            shifts.append(now.sum() - torch.from_numpy(answer.logprobs.astype(np.float64))[mask].sum())
            lengths.append(int(mask.sum()))
        r = shifts if kind == "dpo" else [shifts[0] / lengths[0], shifts[1] / lengths[1]]
        argument = r[0] - r[1] - dpop * torch.relu(-r[0])  # DPOP, arXiv 2402.13228, eq. 3
        loss = (argument - 1 / (2 * beta)) ** 2 if kind == "ipo" else torch.log1p(torch.exp(-beta * argument))
        total = total + (loss - nll * sums[0] / lengths[0]) / len(pairs)
    return total


@pytest.mark.parametrize("kind", ["dpo", "dpo_norm", "ipo"])
@pytest.mark.parametrize("extra", [0.0, 0.3])
def test_preference_losses_and_gradients_equal_float64_reference(kind: str, extra: float) -> None:
    pairs = random_pairs(1)
    exact = small_decoder(3, torch.float64)
    expected = reference_loss(exact, pairs, kind, 0.2, extra, extra)
    expected.backward()
    for budget in (10_000, 12, 1):  # one batch, several batches, one batch per pair
        learner = Learner(small_decoder(3))
        objective = PreferenceObjective(learner.decoder, kind, 0.2, len(pairs), nll=extra, dpop=extra)
        figures = learner.forward_backward_custom(pack_pairs(pairs, budget), objective)
        assert figures["loss"] == pytest.approx(expected.item(), rel=1e-4)
        for (name, weight), other in zip(learner.decoder.named_parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(weight.grad.double(), other.grad, rtol=2e-3, atol=2e-5, msg=name)
        assert objective.figures()["margin"] == pytest.approx(
            PreferenceFigures(exact, pairs, kind).margin, rel=1e-3, abs=1e-5
        )


@dataclasses.dataclass
class PreferenceFigures:
    """The mean margin, from its definition."""

    decoder: nn.Module
    pairs: list
    kind: str

    @property
    def margin(self) -> float:
        margins = []
        for pair in self.pairs:
            shifts = []
            for answer in pair:
                mask = torch.from_numpy(answer.loss_mask)
                shift = (plain_logprobs(self.decoder, answer) - torch.from_numpy(answer.logprobs))[mask]
                shifts.append((shift.sum() if self.kind == "dpo" else shift.mean()).item())
            margins.append((1.0 if self.kind == "ipo" else 0.2) * (shifts[0] - shifts[1]))
        return float(np.mean(margins))


def test_reference_logprobs_are_exact_and_margins_start_at_zero() -> None:
    pairs = random_pairs(2)
    decoder = small_decoder(5)
    for budget in (10_000, 1):
        scored = add_reference_to_pairs(pairs, decoder, budget)
        for pair in scored:
            for answer in pair:
                expected = plain_logprobs(decoder, answer).detach().numpy()[answer.loss_mask]
                np.testing.assert_allclose(answer.logprobs[answer.loss_mask], expected, atol=1e-5)
    learner = Learner(decoder)
    objective = PreferenceObjective(decoder, "dpo", 0.1, len(pairs))
    learner.forward_backward_custom(pack_pairs(scored, 10_000), objective)
    figures = objective.figures()
    assert figures["margin"] == pytest.approx(0.0, abs=1e-6)
    assert figures["chosen_shift"] == pytest.approx(0.0, abs=1e-5)
    learner.optim_step(1e-2)
    assert not np.allclose(  # the reference log-probs do not follow the policy
        plain_logprobs(decoder, scored[0][0]).detach().numpy(), scored[0][0].logprobs
    )


def test_each_process_computes_its_share_of_the_reference_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, decoder = random_pairs(2, 5), small_decoder(5)
    shares: list[list[np.ndarray]] = []

    def gather(_: str, own: list[np.ndarray]) -> list[np.ndarray]:
        shares.append(own)
        return [array for of_ranks in zip_longest(*shares) for array in of_ranks if array is not None]

    first, second = (Ranks(rank, 2) for rank in (0, 1))
    for ranks in (first, second):
        monkeypatch.setattr(ranks, "all_gather_arrays", gather)
    with pytest.raises(ValueError, match="zip"):  # the second process has sent nothing yet
        add_reference_to_pairs(pairs, decoder, 1, first)
    scored = add_reference_to_pairs(pairs, decoder, 1, second)
    count = len(pack_pairs(pairs, 1))
    assert count > 2 and [len(share) for share in shares] == [-(-count // 2), count // 2]
    for found, expected in zip(scored, add_reference_to_pairs(pairs, decoder, 1), strict=True):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_decoder_has_no_dropout() -> None:
    assert not any(isinstance(module, nn.Dropout) for module in small_decoder().modules())


def test_pack_pairs_never_splits_a_pair() -> None:
    for batch in pack_pairs(random_pairs(4, 9), token_budget=1):
        assert int(batch.episode_of.max()) % 2 == 1


def test_pack_pairs_rejects_empty_answers_and_different_prompts() -> None:
    chosen, rejected = random_pairs(0)[0]
    empty = episode(0.0, prompt=chosen.prompt_ids, tokens=(), name="0/3/1")
    with pytest.raises(RequestError, match="0/3/1"):
        pack_pairs([(chosen, empty)], 100)
    with pytest.raises(RequestError, match="different prompts"):
        pack_pairs([(chosen, dataclasses.replace(rejected, prompt_ids=np.array([7], np.int32)))], 100)


def test_dpo_training_reaches_accuracy_1() -> None:
    decoder = small_decoder(7)
    pairs = add_reference_to_pairs(random_pairs(8, 8), decoder, 1000)
    learner = Learner(decoder, OptimizerSettings())
    for _ in range(15):
        objective = PreferenceObjective(decoder, "dpo", 0.5, len(pairs))
        learner.forward_backward_custom(pack_pairs(pairs, 1000), objective)
        learner.optim_step(3e-3)
    assert objective.figures()["accuracy"] == 1.0
