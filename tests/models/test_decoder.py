"""The decoder against transformers on random checkpoints: packed prompts, decoding, gradients, files."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expert_cases import of_each_expert
from safetensors.torch import load_file

from perilune.engine.select_runner import fastest_runner
from perilune.engine.step import StepBatch
from perilune.models.attention import PackedAttention
from perilune.models.checkpoints.loading import load_decoder, save_checkpoint
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder
from perilune.models.kernels import is_exact
from perilune.models.memory import get_model_card
from perilune.models.text.tokenizer import Tokenizer

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
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
GEMMA_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "qwen3 tied, one kv head": ("Qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3 full heads, biased": ("Qwen3", {"num_key_value_heads": 4, "attention_bias": True}),
    "llama": ("Llama", {}),
    "llama tied, biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3 scaling": ("Llama", {"rope_parameters": LLAMA3}),
    "yarn scaling": ("Llama", {"rope_parameters": YARN}),
    "llama heads wider than hidden": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "llama linear scaling": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied, late windows": (
        "Qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 20}),
    "mistral without windows": ("Mistral", {"sliding_window": None}),
    "olmo2": ("Olmo2", {"head_dim": 16}),
    "olmo2 biased": ("Olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "gemma3": (
        "Gemma3Text",
        {"sliding_window": 20, "layer_types": GEMMA_LAYERS, "query_pre_attn_scalar": 11},
    ),
    "gemma3 untied, capped": (
        "Gemma3Text",
        {
            "sliding_window": 7,
            "sliding_window_pattern": 2,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "qwen3 moe": ("Qwen3Moe", EXPERTS),
    "qwen3 moe, some dense": (
        "Qwen3Moe",
        {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "qwen3 moe, every second": ("Qwen3Moe", {**EXPERTS, "num_experts_per_tok": 1, "decoder_sparse_step": 2}),
}


def make(variant: str) -> Any:
    """A transformers model with random biases and norms."""
    import transformers

    family, changes = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            if name.endswith("mlp.gate.weight"):
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    """A model of transformers, and our decoder loaded from its checkpoint."""
    theirs = make(request.param)
    path = tmp_path_factory.mktemp("checkpoint")
    theirs.save_pretrained(path)
    return theirs, load_decoder(Decoder, path)


SEQUENCES = [torch.randint(0, 98, (length,), generator=torch.Generator().manual_seed(length))
             for length in (5, 90, 33)]  # fmt: skip


@torch.no_grad()
def test_packed_logits_equal_those_of_transformers(pair: tuple[Any, Decoder]) -> None:
    theirs, ours = pair
    expected = torch.cat([theirs(s[None]).logits[0] for s in SEQUENCES])
    positions = torch.cat([torch.arange(len(s)) for s in SEQUENCES])
    bounds = torch.tensor([0, *(len(s) for s in SEQUENCES)]).cumsum(0)
    hidden = ours(torch.cat(SEQUENCES), positions, PackedAttention(bounds))
    torch.testing.assert_close(ours.logits(hidden), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("arithmetic")
@torch.no_grad()
def test_incremental_logits_equal_those_of_transformers(pair: tuple[Any, Decoder]) -> None:
    theirs, ours = pair
    runner = fastest_runner(ours, blocks_of(ours))
    bounds = [0, 3, 4, 5, 17, 30, 31, 32, 33]
    logits = [runner.run(chunk(ours, start, stop)) for start, stop in pairwise(bounds)]
    longest = [s[None, :33] for s in SEQUENCES[1:]]
    expected = torch.stack([theirs(s).logits[0, np.array(bounds[1:]) - 1] for s in longest])
    torch.testing.assert_close(torch.stack(logits, dim=1), expected, rtol=1e-5, atol=1e-5)


def blocks_of(decoder: Decoder) -> list[int]:
    return [1 + 3 * 3 for _ in decoder.config.distinct_windows]


def chunk(decoder: Decoder, start: int, stop: int) -> StepBatch:
    """Tokens start .. stop - 1 of the two longer sequences, with three blocks each."""
    return StepBatch(
        token_ids=np.concatenate([s[start:stop].numpy() for s in SEQUENCES[1:]]),
        positions=np.tile(np.arange(start, stop), 2),
        cu_seqlens=np.arange(3) * (stop - start),
        decodes=2 if stop - start == 1 else 0,
        block_tables=np.stack(
            [np.arange(1, 7, dtype=np.int32).reshape(2, 3)] * len(decoder.config.distinct_windows)
        ),
        logit_rows=np.array([stop - start - 1, 2 * (stop - start) - 1]),
    )


@pytest.mark.skipif(not is_exact(torch.zeros(1)), reason="needs a torch built with oneDNN")
@torch.no_grad()
def test_incremental_logits_are_bitwise_equal_to_whole_sequence(
    pair: tuple[Any, Decoder], arithmetic: str
) -> None:
    _, ours = pair
    tokens = torch.cat([s[:33] for s in SEQUENCES[1:]])
    attention = PackedAttention(torch.tensor([0, 33, 66]))
    whole = ours.logits(ours(tokens, torch.arange(33).repeat(2), attention)).view(2, 33, -1)
    runner = fastest_runner(ours, blocks_of(ours))
    for start, stop in pairwise([0, 3, 4, 5, 17, 30, 31, 32, 33]):
        assert torch.equal(runner.run(chunk(ours, start, stop)), whole[:, stop - 1])


def test_gradients_equal_those_of_transformers(pair: tuple[Any, Decoder]) -> None:
    theirs, ours = pair
    tokens = SEQUENCES[2]
    theirs(tokens[None]).logits.logsumexp(-1).sum().backward()
    hidden = ours(tokens, torch.arange(len(tokens)), PackedAttention(torch.tensor([0, len(tokens)])))
    ours.logits(hidden).logsumexp(-1).sum().backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, grad in [(name, grad) for name, grad in expected.items() if ".experts." in name]:
        expected.update(of_each_expert(name, grad))
    for name, parameter in ours.named_parameters():
        got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        scale = expected[name].abs().max()
        torch.testing.assert_close(got, expected[name], rtol=1e-4, atol=1e-5 * float(scale))
    theirs.zero_grad()
    ours.zero_grad()


def test_parameters_have_hugging_face_names(pair: tuple[Any, Decoder], tmp_path: Path) -> None:
    theirs, ours = pair
    theirs.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert set(ours.state_dict()) == set(stored)
    assert get_model_card(ours.config).parameters == sum(tensor.numel() for tensor in stored.values())


@torch.no_grad()
@pytest.mark.filterwarnings("error")
def test_transformers_loads_saved_checkpoint(pair: tuple[Any, Decoder], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs, ours = pair
    save_checkpoint(tmp_path, ours, Tokenizer.characters())
    again, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.dtype == torch.float32
    tokens = SEQUENCES[1][None]
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)
    assert AutoTokenizer.from_pretrained(tmp_path).encode("12+3=") == Tokenizer.characters().encode("12+3=")


def test_frozen_copy_keeps_its_weights() -> None:
    decoder = Decoder(PRESETS["tiny"])
    decoder.initialize(0)
    frozen = decoder.frozen_copy()
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


def test_initial_weights_depend_only_on_the_seed() -> None:
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
