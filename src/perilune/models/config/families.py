"""Families of models that the one decoder computes, and what sets each of them apart.

What differs between models of one family (sizes, windows, bases) is in their `DecoderConfig`; what all of a
family share is here, so that a model is its family and its figures, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Architecture = Literal["qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "olmo2", "gemma3_text"]
"""A family, by its `model_type` in config.json."""


@dataclass(frozen=True, slots=True)
class Family:
    """What all models of a family share. The defaults are Llama's.

    Attributes:
        hf_class: its class in transformers.
        qkv_bias: whether q, k and v have biases whatever `attention_bias` says.
        qk_norm: queries and keys are normalised before they are rotated: each "head" by itself, or the
            "full" width of all heads.
        pre_norm: whether attention and feed-forward see a normalised copy of the residual stream.
        post_norm: whether what they add to it is normalised.
        norm_offset: a norm weight w multiplies by 1 + w, so that zero is neutral.
        activation: of the feed-forward gate.
        scaled_embeddings: whether embeddings are multiplied by sqrt(hidden_size).
        windows: which layers may have a sliding window.
        options: keys of config.json beyond those of every family, that are read and written.
        defaults: what transformers assumes where config.json is silent, if not the reader's own default.
    """

    hf_class: str
    qkv_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None
    pre_norm: bool = True
    post_norm: bool = False
    norm_offset: bool = False
    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    scaled_embeddings: bool = False
    windows: Literal["none", "all", "some"] = "none"
    options: frozenset[str] = frozenset({"attention_bias"})
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN = frozenset({"use_sliding_window", "sliding_window", "layer_types"})
_EXPERTS = frozenset(
    {
        "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
        "decoder_sparse_step", "mlp_only_layers",
    }
)  # fmt: skip

_GEMMA = frozenset(
    {
        "attention_bias", "sliding_window", "layer_types", "rope_local_base_freq", "query_pre_attn_scalar",
        "final_logit_softcapping",
    }
)  # fmt: skip

FAMILIES: Mapping[Architecture, Family] = MappingProxyType(
    {
        "llama": Family("LlamaForCausalLM", options=frozenset({"attention_bias", "mlp_bias"})),
        "mistral": Family(
            "MistralForCausalLM",
            windows="all",
            options=frozenset({"sliding_window"}),
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        ),
        "qwen2": Family(
            "Qwen2ForCausalLM",
            qkv_bias=True,
            windows="some",
            options=_QWEN,
            defaults={"sliding_window": 4096},
        ),
        "qwen3": Family(
            "Qwen3ForCausalLM",
            qk_norm="head",
            windows="some",
            options=_QWEN | {"attention_bias"},
            defaults={"head_dim": 128, "sliding_window": 4096},
        ),
        "qwen3_moe": Family(
            "Qwen3MoeForCausalLM",
            qk_norm="head",
            windows="all",
            options=_QWEN | _EXPERTS | {"attention_bias"},
            defaults={"sliding_window": 4096},
        ),
        "olmo2": Family(
            "Olmo2ForCausalLM",
            qk_norm="full",
            pre_norm=False,
            post_norm=True,
            defaults={"rms_norm_eps": 1e-5},
        ),
        "gemma3_text": Family(
            "Gemma3ForCausalLM",
            qk_norm="head",
            post_norm=True,
            norm_offset=True,
            activation="gelu_pytorch_tanh",
            scaled_embeddings=True,
            windows="some",
            options=_GEMMA,
            defaults={
                "head_dim": 256,
                "num_key_value_heads": 4,
                "tie_word_embeddings": True,
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
                "sliding_window_pattern": 6,
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
            },
        ),
    }
)
