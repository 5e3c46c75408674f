"""Model cards of every family against the model that transformers builds from the same config.json."""

import json
from typing import Any

import pytest
import torch

from perilune.errors import RequestError
from perilune.models.card.from_config import model_card
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.config.families import DECODER_FAMILIES, FAMILIES
from perilune.models.decoder import Decoder
from perilune.models.memory import get_model_card

SMALL = {
    "vocab_size": 500, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT = {"vocab_size": 500, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 20, "linear_conv_kernel_dim": 4, "head_dim": 24,
}  # fmt: skip
KIMI = {
    "q_lora_rank": None, "num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 2,
    "moe_intermediate_size": 48, "linear_head_dim": 8, "linear_num_heads": 3, "linear_conv_kernel_dim": 4,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}  # fmt: skip
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
HALF = {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 16}

CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", SMALL),
    (
        "llama",
        SMALL | {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True},
    ),
    ("granite", SMALL),
    ("smollm3", SMALL),
    ("mistral", SMALL | {"sliding_window": 64}),
    ("mixtral", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("phi3", SMALL),
    ("qwen2", SMALL | {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 32}),
    ("qwen2_moe", SMALL | EXPERTS | {"shared_expert_intermediate_size": 96}),
    ("qwen2_moe", SMALL | EXPERTS | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "qkv_bias": False}),
    ("qwen3", SMALL | {"head_dim": 24}),
    ("qwen3", SMALL | {"attention_bias": True}),
    ("qwen3_moe", SMALL | EXPERTS | {"mlp_only_layers": [0]}),
    ("qwen3_next", SMALL | EXPERTS | DELTA | {"shared_expert_intermediate_size": 32}),
    ("qwen3_5_text", SMALL | DELTA),
    ("qwen3_5_moe_text", SMALL | EXPERTS | DELTA | {"shared_expert_intermediate_size": 32}),
    ("gemma", SMALL | {"head_dim": 20}),
    ("gemma2", SMALL | {"head_dim": 20, "sliding_window": 32}),
    ("gemma3_text", SMALL | {"num_hidden_layers": 7, "sliding_window": 32}),
    ("gemma3_text", SMALL | {"head_dim": 20, "sliding_window_pattern": 2, "sliding_window": 32}),
    ("olmo", SMALL),
    ("olmo2", SMALL),
    ("olmo3", SMALL | {"sliding_window": 32}),
    ("olmoe", SMALL | {"num_experts": 8, "num_experts_per_tok": 2}),
    ("cohere2", SMALL | {"sliding_window": 32}),
    ("gpt2", GPT),
    ("gpt_bigcode", GPT),
    ("gpt_bigcode", GPT | {"multi_query": False, "n_inner": 96}),
    ("gpt_neox", SMALL | {"num_key_value_heads": 4}),
    ("starcoder2", SMALL | {"sliding_window": 32}),
    ("starcoder2", SMALL | {"use_bias": False}),
    ("deepseek_v2", SMALL | LATENT | ROUTED),
    ("deepseek_v2", SMALL | LATENT | ROUTED | {"q_lora_rank": None}),
    ("deepseek_v3", SMALL | LATENT | ROUTED),
    ("deepseek_v3", SMALL | LATENT | ROUTED | {"attention_bias": True}),
    ("glm4_moe", SMALL | ROUTED | {"use_qk_norm": True, "attention_bias": True, "head_dim": 24}),
    ("gpt_oss", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 24}),
    ("mimo_v2_flash", SMALL | ROUTED | HALF | {"v_head_dim": 12, "head_dim": 24, "n_shared_experts": None}),
    ("minimax", SMALL | LINEAR | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("kimi_linear", SMALL | LATENT | LINEAR | KIMI),
]


def build_with_transformers(kind: str, options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The config.json that transformers writes, and the model on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **options)
    with torch.device("meta"):
        return config.to_dict(), AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(("kind", "options"), CONFIGS)
def test_card_parameters_equal_those_of_transformers(kind: str, options: dict[str, Any]) -> None:
    written, model = build_with_transformers(kind, options)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert model_card({"model_type": kind, **options}).parameters == expected
    assert model_card(json.loads(json.dumps(written))).parameters == expected


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, options) for kind, options in CONFIGS if kind in DECODER_FAMILIES],
)
def test_card_parameters_windows_and_cache_equal_those_of_the_decoder(
    kind: str, options: dict[str, Any]
) -> None:
    """The card of a family that the decoder computes has the decoder's parameters, windows and cache."""
    config = DecoderConfig.from_hf({"model_type": kind, **options})
    with torch.device("meta"):
        decoder = Decoder(config)
    card = get_model_card(config)
    assert card.parameters == sum(parameter.numel() for parameter in decoder.parameters())
    assert not card.notes
    delta, layers = config.delta, range(config.num_layers)
    attending = [layer for layer in layers if not config.is_linear(layer)]
    assert [card.layers[layer].mixer.window for layer in attending] == list(map(config.window, attending))
    heads, size = config.cached_heads
    tokens = (1 if config.latent else 2) * len(attending) * heads * size * 10
    state = delta.heads * delta.key_size * delta.value_size + 3 * delta.channels if delta else 0
    assert card.cache_bytes(10, 4) == 4 * (tokens + (len(layers) - len(attending)) * state)


def test_every_family_is_compared_with_transformers() -> None:
    # kimi_k2 has the architecture of DeepSeek-V3; transformers has no class of that name.
    assert {kind for kind, _ in CONFIGS} == set(FAMILIES) - {"kimi_k2"}


def test_card_of_multimodal_model_covers_the_language_model() -> None:
    inner = {"model_type": "gemma3_text", **SMALL}
    card = model_card({"model_type": "gemma3", "text_config": inner, "vision_config": {}})
    assert card.parameters == model_card(inner).parameters
    assert card.notes == ("the language model alone: encoders for images or sound are not counted",)


def test_unknown_family_is_read_like_llama_with_a_note() -> None:
    card = model_card({"model_type": "llama_of_tomorrow", **SMALL})
    assert card.parameters == model_card({"model_type": "llama", **SMALL}).parameters
    assert card.notes == (
        "the family llama_of_tomorrow is unknown and read like Llama, so the numbers are estimates",
    )
    assert not model_card({"model_type": "llama", **SMALL}).notes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "config.json:model_type: model_type is None"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "decoder-only"),
        ({"hidden_size": None}, "config.json:hidden_size: hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"vocab_size": 2**40}, "vocab_size is 1099511627776"),
        ({"num_hidden_layers": 10**6}, "give at most 10000"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"layer_types": ["full_attention"]}, "give one kind for each layer"),
        ({"layer_types": ["retention"] * 4}, "layers of kind 'retention' are not supported"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ({"layer_types": ["linear_attention"] * 4}, "this kind of linear attention is not supported"),
        ({"layer_types": [{}] * 4}, "are not supported"),
        ({"num_experts": 4}, "num_experts_per_tok is missing"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5"),
        ({"num_experts": 4, "num_experts_per_tok": 1, "decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"text_config": {"hidden_size": 3}}, "config.json:text_config:model_type"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ({"kv_lora_rank": 8}, "qk_nope_head_dim is missing"),
    ],
)
def test_invalid_config_is_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        model_card({"model_type": "llama", **SMALL} | change)
    assert message in str(refused.value)


def test_config_that_is_not_an_object_is_rejected() -> None:
    with pytest.raises(RequestError, match="holds a list"):
        model_card([])  # type: ignore[arg-type]
