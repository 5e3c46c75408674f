"""Prompt sharing: each prompt is computed once; states and gradients equal those of separate sequences."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_cases import VOCABULARY, episode, random_groups, small_decoder, weighted_groups

from perilune.data.episode import Episode
from perilune.learn.adaptation import adapt, trainable
from perilune.learn.batch import pack
from perilune.learn.trainer import predicting_states, target_logprobs, token_logprobs
from perilune.learn.training_settings import LearnerSettings
from perilune.models import logprobs
from perilune.models.attention import PackedAttention
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder

Shape = Mapping[str, Any]

SHAPES: dict[str, tuple[Shape, Shape]] = {
    # Overrides of the architecture, and of the learner's settings.
    "grouped queries": ({"num_heads": 6, "num_kv_heads": 2}, {}),
    "window": ({"architecture": "qwen3", "windows": (3, None)}, {}),
    "recomputed layers": ({}, {"activation_checkpointing": True}),
    "adapter": ({"num_heads": 4, "num_kv_heads": 4}, {"lora": {"rank": 2}}),
}


def make(shape: Shape, learning: Shape) -> Decoder:
    config = PRESETS["tiny"].replace(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_layers=2, head_dim=8,
        initializer_range=0.3, **shape,
    )  # fmt: skip
    decoder = Decoder(config)
    decoder.initialize(0)
    adapt(decoder, LearnerSettings.model_validate(learning), seed=0)
    with torch.no_grad():  # a new adapter is zero, and so are half of its gradients
        for number, parameter in enumerate(trainable(decoder).values()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) / 9)
    return decoder.double()


def states_alone(decoder: Decoder, one: Episode) -> torch.Tensor:
    """The states that predict an episode's sampled tokens, from a forward pass over its whole sequence."""
    ids = torch.tensor([*one.prompt_ids.tolist(), *one.token_ids.tolist()])
    states = decoder(ids, torch.arange(len(ids)), PackedAttention(torch.tensor([0, len(ids)])))
    return states[len(one.prompt_ids) - 1 : -1][torch.from_numpy(one.loss_mask)]


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1000), size=st.integers(1, 5), budget=st.integers(20, 300))
def test_shared_prompt_states_and_gradients_equal_those_without_sharing(
    name: str, seed: int, size: int, budget: int
) -> None:
    """Masked tokens stand for observations between turns; only the prompt is shared."""
    decoder = make(*SHAPES[name])
    groups = random_groups(seed, groups=3, size=size, longest=12)
    directions = torch.Generator().manual_seed(seed)
    shared, alone = [], []
    by_id = {answer.episode_id: answer for group in groups for answer in group}
    for batch in pack(weighted_groups("sft", groups), budget):
        shared.append(predicting_states(decoder, batch))
        alone += [states_alone(decoder, by_id[name]) for name in batch.episode_ids]
    found, expected = torch.cat(shared), torch.cat(alone)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    weights = torch.randn(found.shape, generator=directions, dtype=torch.float64)
    parameters = list(trainable(decoder).values())
    gradients, wanted = (
        torch.autograd.grad((states * weights).sum(), parameters, allow_unused=True)
        for states in (found, expected)
    )
    for gradient, other in zip(gradients, wanted, strict=True):
        if other is not None:
            torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_packed_logprobs_are_bitwise_equal_to_each_sequence_alone(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "MAX_LOGITS_PER_CHUNK", rows * VOCABULARY)
    decoder = small_decoder()
    groups = random_groups(3, groups=3, size=4, longest=12)
    for batch in pack(weighted_groups("sft", groups), 60):
        lengths = torch.bincount(batch.episode_of).tolist()
        together = torch.split(token_logprobs(decoder, batch), lengths)
        with_gradient = target_logprobs(decoder, batch, predicting_states(decoder, batch))[0]
        assert torch.equal(with_gradient, torch.cat(together))
        for name, found in zip(batch.episode_ids, together, strict=True):
            answer = next(answer for group in groups for answer in group if answer.episode_id == name)
            (lonely,) = pack(weighted_groups("sft", [[answer]]), 60)
            assert torch.equal(found, token_logprobs(decoder, lonely))


def test_group_of_eight_feeds_its_prompt_once() -> None:
    prompt = list(range(20))
    group = [episode(prompt=prompt, tokens=[1, 2, 3], name=f"0/0/{i}") for i in range(8)]
    (batch,) = pack(weighted_groups("sft", [group]), 1000)
    assert len(batch.token_ids) == 20 + 8 * 2  # the last token of an answer predicts nothing
