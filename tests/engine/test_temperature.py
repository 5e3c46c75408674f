"""Log-probs at every temperature: bitwise equal in sampling, scoring and learning, and close to float64."""

from typing import Any

import numpy as np
import pytest
import torch

from perilune.engine.engine import Engine
from perilune.engine.request import Prompt, SamplingParams
from perilune.models.attention import PackedAttention
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder
from perilune.models.logprobs import apply_temperature, log_distribution, token_logprobs

PROMPTS = [Prompt([5, 6, 7, last], (1, 2, last)) for last in range(4)]
TEMPERATURES = [
    *(1e-30, 1e-6, 0.7, 1.0, 1.7, 1e30),
    *(pytest.param(value, marks=pytest.mark.thorough) for value in (1e-9, 1e-3, 1.1, 3.0)),
]
FEW = torch.tensor([[30.0, 29.9, -50.0, 30.0]])


def make() -> Decoder:
    decoder = Decoder(PRESETS["tiny"].replace(initializer_range=0.15))
    decoder.initialize(0)
    return decoder


DECODER = make()


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("options", [{}, {"raw_logprobs": True}, {"repetition_penalty": 1.5}])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_sampled_scored_and_learner_logprobs_are_equal(temperature: float, options: dict[str, Any]) -> None:
    params = SamplingParams(30, temperature=temperature, **options)
    groups = Engine(DECODER).sample(PROMPTS, 3, params)
    samples = [(p.token_ids, sample) for p, group in zip(PROMPTS, groups, strict=True) for sample in group]
    answers = [sample.token_ids.tolist() for _, sample in samples]
    scored = Engine(DECODER).score([prompt for prompt, _ in samples], answers, temperature)
    for (prompt, sample), answer, again in zip(samples, answers, scored, strict=True):
        assert (sample.logprobs <= 0).all()
        if "repetition_penalty" in options:  # scoring does not apply it
            continue
        ids, targets = torch.tensor(prompt + answer), torch.tensor(answer)
        hidden = DECODER(ids, torch.arange(len(ids)), PackedAttention(torch.tensor([0, len(ids)])))
        logits = DECODER.logits(hidden[len(prompt) - 1 : -1])
        learned, _ = token_logprobs(logits, targets, temperature)
        assert np.array_equal(sample.logprobs, again)
        assert np.array_equal(sample.logprobs, learned.detach().numpy())
        exact = (logits.double() / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(learned.double(), exact, rtol=3e-7, atol=1e-6)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 0.7, 1.0, 3.0])
def test_token_logprobs_gradients_equal_those_in_float64(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator) * 5
    targets = torch.randint(50, (6,), generator=generator)
    targets[:3] = logits[:3].argmax(-1)
    found = logits.clone().requires_grad_()
    token_logprobs(found, targets, temperature)[0].sum().backward()
    wanted = logits.double().requires_grad_()
    (wanted / temperature).log_softmax(-1).gather(1, targets[:, None]).sum().backward()
    assert found.grad is not None and wanted.grad is not None
    torch.testing.assert_close(
        found.grad.double() * temperature, wanted.grad * temperature, rtol=1e-5, atol=1e-6
    )


@pytest.mark.usefixtures("arithmetic")
def test_tied_tokens_share_the_probability_at_the_lowest_temperature() -> None:
    picked = torch.tensor([0])
    assert token_logprobs(FEW, picked, 1e-30)[0].item() == pytest.approx(np.log(0.5))
    assert log_distribution(FEW, 1e-30).exp().tolist() == [[0.5, 0.0, 0.0, 0.5]]
    assert apply_temperature(FEW, 1.0) is FEW  # temperature 1 returns the logits unchanged
