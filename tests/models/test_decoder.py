"""The decoder against transformers on random checkpoints of both families: prompts, and token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from perilune.engine.cache import Decode, KVCache, Memory, Prefill
from perilune.models.attention import PackedAttention
from perilune.models.config import PRESETS
from perilune.models.decoder import Decoder
from perilune.models.loading import load_decoder, save_checkpoint
from perilune.models.tokenizer import Tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 98,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "qwen3 tied, one kv head": ("Qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3 full heads, biased": ("Qwen3", {"num_key_value_heads": 4, "attention_bias": True}),
    "llama": ("Llama", {}),
    "llama tied, biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3 scaling": ("Llama", {"rope_parameters": LLAMA3}),
    "llama heads wider than hidden": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 4}),
}


def make(variant: str) -> Any:
    """A transformers model whose biases and norms are not the neutral ones it starts with."""
    import transformers

    family, changes = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    """The same checkpoint in transformers and here, read from what transformers wrote."""
    theirs = make(request.param)
    path = tmp_path_factory.mktemp("checkpoint")
    theirs.save_pretrained(path)
    return theirs, load_decoder(path)


SEQUENCES = [torch.randint(0, 98, (length,), generator=torch.Generator().manual_seed(length))
             for length in (5, 90, 33)]  # fmt: skip


@torch.no_grad()
def test_logits_of_packed_prompts(pair: tuple[Any, Decoder]) -> None:
    theirs, ours = pair
    expected = torch.cat([theirs(s[None]).logits[0] for s in SEQUENCES])
    positions = torch.cat([torch.arange(len(s)) for s in SEQUENCES])
    bounds = torch.tensor([0, *(len(s) for s in SEQUENCES)]).cumsum(0)
    hidden = ours(torch.cat(SEQUENCES), positions, PackedAttention(bounds))
    torch.testing.assert_close(ours.logits(hidden), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("frozen", [False, True])
def test_logits_token_by_token(pair: tuple[Any, Decoder], frozen: bool) -> None:
    theirs, ours = pair
    ours = ours.frozen() if frozen else ours
    expected = torch.stack([theirs(s[None]).logits[0, 2:][:3] for s in SEQUENCES])
    cache = KVCache(ours.config, len(SEQUENCES), Memory(torch.device("cpu"), torch.float32))
    cache.reserve(5, 0)
    prompts = torch.cat([s[:3] for s in SEQUENCES])
    bounds = torch.tensor([0, 3, 6, 9])
    prefill = Prefill(cache, bounds, torch.arange(3), 0)
    logits = [ours.logits(ours(prompts, torch.arange(3).repeat(3), prefill)[bounds[1:] - 1])]
    for place in (3, 4):
        positions = torch.full((3,), place)
        tokens = torch.stack([s[place] for s in SEQUENCES])
        logits.append(ours.logits(ours(tokens, positions, Decode(cache, positions, place + 1))))
    torch.testing.assert_close(torch.stack(logits, dim=1), expected, rtol=1e-5, atol=1e-5)


def test_gradients(pair: tuple[Any, Decoder]) -> None:
    theirs, ours = pair
    tokens = SEQUENCES[2]
    theirs(tokens[None]).logits.logsumexp(-1).sum().backward()
    hidden = ours(tokens, torch.arange(len(tokens)), PackedAttention(torch.tensor([0, len(tokens)])))
    ours.logits(hidden).logsumexp(-1).sum().backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        scale = expected[name].grad.abs().max()
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-5 * float(scale))
    theirs.zero_grad()
    ours.zero_grad()


def test_parameters_have_hugging_face_names(pair: tuple[Any, Decoder]) -> None:
    theirs, ours = pair
    tied = {"lm_head.weight"} if ours.config.tie_word_embeddings else set()
    assert set(ours.state_dict()) == set(theirs.state_dict()) - tied


@torch.no_grad()
@pytest.mark.filterwarnings("error")
def test_transformers_reads_what_is_written(pair: tuple[Any, Decoder], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs, ours = pair
    save_checkpoint(tmp_path, ours, Tokenizer.characters())
    again, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.dtype == torch.float32
    tokens = SEQUENCES[1][None]
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)
    assert AutoTokenizer.from_pretrained(tmp_path).encode("12+3=") == Tokenizer.characters().encode("12+3=")


def test_a_frozen_copy_keeps_its_weights() -> None:
    decoder = Decoder(PRESETS["tiny"])
    decoder.initialize(0)
    frozen = decoder.frozen()
    tokens, bounds = torch.arange(20), torch.tensor([0, 20])

    def logits(model: Decoder) -> torch.Tensor:
        with torch.no_grad():
            return model.logits(model(tokens, tokens, PackedAttention(bounds)))

    before = logits(decoder)
    assert torch.equal(logits(frozen), before)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.5)
    assert not torch.allclose(logits(decoder), before)
    assert torch.equal(logits(frozen), before)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    def weights(seed: int) -> list[torch.Tensor]:
        decoder = Decoder(PRESETS["tiny"])
        decoder.initialize(seed)
        return list(decoder.state_dict().values())

    torch.manual_seed(1)
    first = weights(7)
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, weights(7), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, weights(8), strict=True))


def test_rotary_angles_stay_precise_in_a_half_precision_model() -> None:
    decoder = Decoder(PRESETS["tiny"])
    cos, _ = decoder.rotary(torch.tensor([4000]))
    low, _ = decoder.to(torch.bfloat16).rotary(torch.tensor([4000]))
    torch.testing.assert_close(low.float(), cos, rtol=0, atol=2**-8)
