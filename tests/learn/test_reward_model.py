"""Reward model with the Bradley-Terry loss: scores, gradients, read position and files."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from learning_cases import episode, small_decoder
from preference_cases import random_pairs

from perilune.errors import RequestError
from perilune.learn.batch import pack_pairs
from perilune.learn.reward_model import (
    RewardObjective,
    append_scored_token,
    append_scored_tokens,
    bradley_terry,
    score,
    score_figures,
    score_pairs,
)
from perilune.learn.trainer import Learner
from perilune.models.attention import PackedAttention
from perilune.models.checkpoints.loading import load_decoder, new_model
from perilune.models.decoder import Decoder
from perilune.models.reward_model import RewardModel, load_reward_model, save_reward_model
from perilune.models.text.tokenizer import Tokenizer


def small_reward_model(seed: int, dtype: torch.dtype = torch.float32) -> RewardModel:
    model = RewardModel.from_decoder(small_decoder(seed))
    head = torch.randn(model.score.weight.shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        model.score.weight.copy_(head)
    return model.to(dtype)


def plain_score(model: RewardModel, one) -> torch.Tensor:
    """The score of one episode: the head applied to the state at its last token."""
    ids = torch.from_numpy(np.concatenate([one.prompt_ids, one.token_ids]).astype(np.int64))
    hidden = model(ids, torch.arange(len(ids)), PackedAttention(torch.tensor([0, len(ids)])))
    return hidden[-1] @ model.score.weight[0]


def test_bradley_terry_worked_example() -> None:
    chosen = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.0, 2.0], dtype=torch.float64)
    losses = bradley_terry(chosen, rejected)
    assert losses.tolist() == pytest.approx([math.log1p(math.exp(-1)), math.log1p(math.exp(2))])
    losses.sum().backward()
    assert chosen.grad.tolist() == pytest.approx([-1 / (1 + math.e), -1 / (1 + math.exp(-2))])
    centred = bradley_terry(chosen.detach(), rejected, centre=0.1) - losses.detach()
    assert centred.tolist() == pytest.approx([0.1 * 1, 0.1 * 4])


def test_score_is_read_at_the_last_token() -> None:
    model = small_reward_model(0)
    episodes = [answer for pair in random_pairs(1, 4) for answer in pair] + [episode(0.0, tokens=())]
    expected = [plain_score(model, answer).item() for answer in episodes]
    for budget in (10_000, 20, 1):
        assert score(model, episodes, budget).tolist() == pytest.approx(expected, abs=1e-5)


def test_score_is_read_at_the_last_token_even_when_masked() -> None:
    answer = episode(0.0, tokens=(4, 5, 6), mask=(True, False, False))
    top = np.zeros((3, 2))
    answer = replace(answer, top_ids=top.astype(np.int32), top_logprobs=top.astype(np.float32))
    assert append_scored_token(answer).loss_mask.tolist() == [False, False, False, True]
    model = small_reward_model(0)
    assert score(model, [answer], 100)[0] == pytest.approx(plain_score(model, answer).item(), abs=1e-5)


@pytest.mark.parametrize("budget", [10_000, 15, 1])
def test_reward_loss_and_gradient_equal_float64_reference(budget: int) -> None:
    pairs = random_pairs(6, 4)
    exact = small_reward_model(2, torch.float64)
    expected = torch.zeros((), dtype=torch.float64)
    for chosen, rejected in pairs:
        a, b = plain_score(exact, chosen), plain_score(exact, rejected)
        expected = expected + (torch.log1p(torch.exp(b - a)) + 0.01 * (a + b) ** 2) / len(pairs)
    expected.backward()
    model = small_reward_model(2)
    learner = Learner(model)
    objective = RewardObjective(model, len(pairs), centre=0.01)
    figures = learner.forward_backward_custom(pack_pairs(append_scored_tokens(pairs), budget), objective)
    assert figures["loss"] == pytest.approx(expected.item(), rel=1e-4)
    for (name, parameter), other in zip(model.named_parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.double(), other.grad, rtol=3e-3, atol=3e-5, msg=name)
    assert model.score.weight.grad.abs().max() > 0
    assert (
        objective.figures(pairs)["accuracy"]
        == score_figures(score_pairs(model, pairs, budget), pairs)["accuracy"]
    )


def test_score_metrics_worked_example() -> None:
    pairs = [
        (episode(1.0, tokens=range(4)), episode(0.0, tokens=range(2))),
        (episode(1.0, tokens=range(3)), episode(0.0, tokens=range(3))),
    ]
    figures = score_figures(np.array([[3.0, 1.0], [0.0, 1.0]]), pairs)
    assert figures == {
        "accuracy": 0.5, "margin": 0.5, "score": 1.25, "length_correlation": pytest.approx(1.0)
    }  # fmt: skip
    assert "length_correlation" not in score_figures(np.array([[3.0, 1.0]]), pairs[:1])


def test_new_reward_model_scores_zero_and_training_reaches_accuracy_1() -> None:
    model = RewardModel.from_decoder(small_decoder(3))
    pairs = random_pairs(9, 6)
    assert not score_pairs(model, pairs, 100).any()
    learner = Learner(model)
    for _ in range(25):
        objective = RewardObjective(model, len(pairs))
        learner.forward_backward_custom(pack_pairs(append_scored_tokens(pairs), 100), objective)
        learner.optim_step(3e-3)
    assert score_figures(score_pairs(model, pairs, 100), pairs)["accuracy"] == 1.0


def test_reward_model_does_not_share_weights_with_its_decoder() -> None:
    decoder = small_decoder(3)
    model = RewardModel.from_decoder(decoder)
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
    assert decoder.model.embed_tokens.weight.abs().max() > 0


def test_transformers_loads_reward_model_and_scores_agree(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    tokenizer = Tokenizer.characters()
    decoder = new_model("tiny", tokenizer, 1)
    model = RewardModel.from_decoder(decoder)
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    save_reward_model(tmp_path / "rm", model, tokenizer)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    assert type(theirs).__name__ == "Qwen3ForSequenceClassification"
    ids = [5, 6, 7, 8, 1]
    answer = episode(0.0, prompt=ids[:2], tokens=ids[2:])
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits.item()
    again, _ = load_reward_model(tmp_path / "rm")
    assert score(again, [answer], 100)[0] == pytest.approx(expected, abs=1e-4)
    assert score(model, [answer], 100)[0] == score(again, [answer], 100)[0]


def test_loading_rejects_reward_model_as_policy_and_policy_as_reward_model(tmp_path: Path) -> None:
    from perilune.models.checkpoints.loading import save_checkpoint

    tokenizer = Tokenizer.characters()
    decoder = new_model("tiny", tokenizer, 1)
    save_checkpoint(tmp_path / "policy", decoder, tokenizer)
    with pytest.raises(RequestError, match=r"score.weight is missing"):
        load_reward_model(tmp_path / "policy")
    save_reward_model(tmp_path / "rm", RewardModel.from_decoder(decoder), tokenizer)
    with pytest.raises(RequestError, match=r"score.weight is not part of this architecture"):
        load_decoder(Decoder, tmp_path / "rm")
    assert json.loads((tmp_path / "rm" / "config.json").read_text())["id2label"] == {"0": "reward"}
