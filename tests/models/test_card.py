"""Model card figures against published numbers and plain sums."""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.models.card.from_config import model_card
from perilune.models.card.layers import Attention, LatentAttention
from perilune.models.card.model_card import mean_context

GPT2_XL = {
    "model_type": "gpt2",
    "n_embd": 1600,
    "n_layer": 48,
    "n_head": 25,
    "n_positions": 1024,
    "vocab_size": 50257,
}
LLAMA_3_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192,
}  # fmt: skip
OLMO_2_7B = {
    "model_type": "olmo2", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100352,
    "max_position_embeddings": 4096,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280, "max_position_embeddings": 163840, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 40960,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    "use_sliding_window": False, "sliding_window": None,
}  # fmt: skip
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10,
    "vocab_size": 151936, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "max_position_embeddings": 262144, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "kibibytes"), [(GPT2_XL, 300), (LLAMA_3_8B, 128), (OLMO_2_7B, 512), (DEEPSEEK_V3, 68.625)]
)
def test_cache_bytes_per_token_of_published_models(config: dict[str, Any], kibibytes: float) -> None:
    card = model_card(config)
    assert card.cache_bytes_per_token(1) == card.cache_bytes_per_token(1000) == kibibytes * 1024


@pytest.mark.parametrize(
    ("config", "parameters", "idle"),
    [
        (GPT2_XL, 1_557_611_200, 0),
        (LLAMA_3_8B, 8_030_261_248, 0),
        (OLMO_2_7B, 7_298_617_344, 0),
        (QWEN3_30B_A3B, 30_532_122_624, 48 * 120 * 3 * 2048 * 768),  # 3.3 billion active
        (DEEPSEEK_V3, 671_026_404_352, 58 * 248 * 3 * 7168 * 2048),  # 37 billion active
    ],
)
def test_parameters_and_active_parameters_of_published_models(
    config: dict[str, Any], parameters: int, idle: int
) -> None:
    card = model_card(config)
    assert card.parameters == parameters
    assert card.active_parameters == parameters - idle


def test_cache_of_sliding_window_layers_stops_growing() -> None:
    """10 full layers, 60 with a window of 128: 1/4 of the full cache at 1,000 tokens, 0.146 at 32,768."""
    layers = (["full_attention"] + ["sliding_attention"] * 6) * 10
    mixed = LLAMA_3_8B | {"num_hidden_layers": 70, "layer_types": layers, "sliding_window": 128}
    card, full = model_card(mixed), model_card(LLAMA_3_8B | {"num_hidden_layers": 70})
    for tokens in (1, 128, 129, 1000, 32_768, 1_000_000):
        expected = (10 * tokens + 60 * min(tokens, 128)) / (70 * tokens)
        assert card.cache_bytes(tokens) / full.cache_bytes(tokens) == pytest.approx(expected)
    assert card.cache_bytes(1000) / full.cache_bytes(1000) == pytest.approx(0.25, abs=0.005)
    assert card.cache_bytes(32_768) / full.cache_bytes(32_768) == pytest.approx(0.1462, abs=5e-5)
    assert card.cache_bytes(10**9) / full.cache_bytes(10**9) == pytest.approx(1 / 7, abs=1e-6)
    assert card.kinds() == {
        "GQA 32/8 heads of 128; feed-forward 14,336": 10,
        "GQA 32/8 heads of 128, window 128; feed-forward 14,336": 60,
    }
    assert card.variants()[:2] == [
        ("0", "GQA 32/8 heads of 128; feed-forward 14,336"),
        ("1-6", "GQA 32/8 heads of 128, window 128; feed-forward 14,336"),
    ]


def test_recurrent_state_does_not_grow_with_the_sequence() -> None:
    card = model_card(QWEN3_NEXT_80B)
    state = 36 * 32 * 128 * 128 * 4  # float32
    convolution = 36 * (2 * 16 * 128 + 32 * 128) * 3 * 2  # inputs before the current one
    for tokens in (1, 1000, 262_144):
        assert card.cache_bytes(tokens) == state + convolution + 12 * 2 * 2 * 256 * 2 * tokens
    assert card.cache_bytes_per_token(1) > 1000 * card.cache_bytes_per_token(262_144)
    assert round(card.parameters / 1e9) == 80
    assert round(card.active_parameters / 1e9) == 4  # the published 3 billion exclude embedding and head


def test_cache_dtype_scales_keys_and_values_but_not_recurrent_state() -> None:
    card = model_card(QWEN3_NEXT_80B)
    state = 4 * sum(layer.mixer.state_size for layer in card.layers)
    assert (card.cache_bytes(500, 4) - state) == 4 * (card.cache_bytes(500, 1) - state)


@given(tokens=st.integers(1, 300), window=st.none() | st.integers(1, 300))
def test_mean_context_equals_mean_over_positions(tokens: int, window: int | None) -> None:
    seen = [min(position + 1, window or tokens) for position in range(tokens)]
    assert mean_context(tokens, window) == pytest.approx(sum(seen) / tokens)


def test_flops_equal_the_sum_over_matrix_products() -> None:
    card = model_card(LLAMA_3_8B)
    layer = 2 * 4096 * (2 * 4096 + 2 * 1024) + 2 * 3 * 4096 * 14336
    products = 32 * layer + 2 * 4096 * 128256
    assert card.decode_flops(1000) == pytest.approx(products + 32 * 4 * 4096 * 1000, rel=1e-4)
    assert card.training_flops(1000) == pytest.approx(3 * (products + 32 * 4 * 4096 * 500.5), rel=1e-4)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_flops_agree_with_the_flop_counter_of_torch(kind: str) -> None:
    """The attention of transformers computes masked scores too, so the expected FLOPs include them."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {
        "hidden_size": 128, "intermediate_size": 200, "vocab_size": 300, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "first_k_dense_replace": 1, "pad_token_id": 0,
    }  # fmt: skip
    if kind == "deepseek_v3":
        options |= {
            "num_key_value_heads": 4,
            "kv_lora_rank": 64,
            "q_lora_rank": 32,
            "qk_nope_head_dim": 24,
            "v_head_dim": 40,
        }
    built = AutoConfig.for_model(kind, **options, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(built).eval()
    tokens = 40
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.int64))
    card = model_card({"model_type": kind, **options})
    mixer = card.layers[0].mixer
    saving = mixer.flops_uncached(tokens) - mixer.flops_uncached(mean_context(tokens, None))
    assert counter.get_total_flops() == pytest.approx(
        tokens * (card.training_flops(tokens) / 3 + saving), rel=0.01
    )


def test_latent_attention_uses_more_flops_with_cache() -> None:
    mixer = model_card(DEEPSEEK_V3).layers[0].mixer
    assert isinstance(mixer, LatentAttention)
    assert mixer.flops(1) == 2 * 128 * (512 + 64 + 512)
    assert mixer.flops_uncached(1) == 2 * 128 * (128 + 64 + 128)


@pytest.mark.parametrize(
    ("heads", "name"), [(8, "MHA 8 heads of 4"), (2, "GQA 8/2 heads of 4"), (1, "MQA 8 heads of 4")]
)
def test_attention_name_follows_its_head_counts(heads: int, name: str) -> None:
    assert Attention(0, 8, heads, 4, 4).name == name


def test_model_card_does_not_import_torch() -> None:
    code = "import sys, perilune.models.card.from_config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
