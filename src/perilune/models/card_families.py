"""What sets families of decoder-only models apart, as far as parameters, cache and compute go.

Every entry is held, parameter by parameter, to the model that transformers builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

Bias = bool | str
"""Whether there is a bias, or the key of config.json that says so."""


@dataclass(frozen=True, slots=True)
class CardFamily:
    """Habits of a family. The defaults are Llama's.

    Attributes:
        norms: how many of them over the hidden size a layer has.
        norm_vectors: learned vectors of a norm: 1, or 2 with a bias.
        qkv_bias, out_bias, mlp_bias: of the projections of attention, of its output, of the feed-forward.
        matrices: of a feed-forward network: 3 with a gate.
        qk_norm: norms of queries and keys: of each "head", or of the "full" width; or the key that, when
            true, says of each head.
        output_gate: whether attention's output is gated by as many numbers as there are queries.
        sinks: whether each head learns a logit for attending to nothing: in every layer, or in those with a
            window.
        tied: what a missing `tie_word_embeddings` means.
        windows: which layers have one where `layer_types` does not say: "all" when `sliding_window` is set;
            the "upper" from `max_window_layers` on; or "most", all but every `full_every`-th.
        linear: kind of the linear attention of layers that are said, or by `full_every` known, to have one.
        full_every: see above; the keys `full_attention_interval` and `sliding_window_pattern` go before it.
        expert_bias: whether experts and their router have biases.
        shared_gate: whether the shared expert has a gate.
        positions: whether positions are learned.
        names: keys by which the family calls what others call otherwise.
        defaults: values of keys that its config.json files leave out.
    """

    norms: int = 2
    norm_vectors: int = 1
    qkv_bias: Bias = "attention_bias"
    out_bias: Bias = "attention_bias"
    mlp_bias: Bias = "mlp_bias"
    matrices: int = 3
    qk_norm: str = ""
    output_gate: bool = False
    sinks: Literal["", "all", "windows"] = ""
    tied: bool = False
    windows: Literal["none", "all", "upper", "most"] = "none"
    linear: Literal["", "delta", "lightning", "kimi"] = ""
    full_every: int = 0
    expert_bias: bool = False
    shared_gate: bool = False
    positions: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


_LLAMA = CardFamily()
_MISTRAL = CardFamily(qkv_bias=False, out_bias=False, windows="all", defaults={"num_key_value_heads": 8})
_OLMO = CardFamily(qk_norm="full")
_DEEPSEEK = CardFamily(
    mlp_bias=False, defaults={"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
)
_QWEN_NEXT = CardFamily(
    qk_norm="head",
    output_gate=True,
    linear="delta",
    full_every=4,
    shared_gate=True,
    defaults={
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "shared_expert_intermediate_size": 512,
    },
)
_GPT = CardFamily(
    norm_vectors=2,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    matrices=2,
    tied=True,
    positions=True,
    names={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
    },
)

CARD_FAMILIES: Mapping[str, CardFamily] = MappingProxyType(
    {
        "llama": _LLAMA,
        "granite": _LLAMA,
        "smollm3": CardFamily(tied=True, windows="upper"),
        "mistral": _MISTRAL,
        "mixtral": _MISTRAL,
        "phi3": CardFamily(qkv_bias=False, out_bias=False, windows="all"),
        "qwen2": CardFamily(qkv_bias=True, out_bias=False, windows="upper"),
        "qwen2_moe": CardFamily(
            qkv_bias="qkv_bias",
            out_bias=False,
            windows="upper",
            shared_gate=True,
            defaults={"qkv_bias": True, "shared_expert_intermediate_size": 5632},
        ),
        "qwen3": CardFamily(qk_norm="head", windows="upper", defaults={"head_dim": 128}),
        "qwen3_moe": CardFamily(qk_norm="head", windows="all"),
        "qwen3_next": _QWEN_NEXT,
        "qwen3_5_text": _QWEN_NEXT,
        "qwen3_5_moe_text": _QWEN_NEXT,
        "gemma": CardFamily(tied=True, defaults={"head_dim": 256}),
        "gemma2": CardFamily(
            norms=4,
            tied=True,
            windows="most",
            full_every=2,
            defaults={"head_dim": 256, "sliding_window": 4096},
        ),
        "gemma3_text": CardFamily(
            norms=4,
            qk_norm="head",
            tied=True,
            windows="most",
            full_every=6,
            defaults={
                "vocab_size": 262208,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "sliding_window": 4096,
                "max_position_embeddings": 131072,
            },
        ),
        "olmo": CardFamily(norms=0, norm_vectors=0),
        "olmo2": _OLMO,
        "olmo3": CardFamily(qk_norm="full", windows="most", full_every=4, defaults={"sliding_window": 4096}),
        "olmoe": _OLMO,
        "cohere2": CardFamily(
            norms=1, tied=True, windows="most", full_every=4, defaults={"sliding_window": 4096}
        ),
        "gpt2": _GPT,
        "gpt_bigcode": replace(_GPT, defaults={"multi_query": True}),
        "gpt_neox": CardFamily(
            norm_vectors=2,
            mlp_bias=True,
            matrices=2,
            defaults={"attention_bias": True},
        ),
        "starcoder2": CardFamily(
            norm_vectors=2,
            qkv_bias="use_bias",
            out_bias="use_bias",
            mlp_bias="use_bias",
            matrices=2,
            tied=True,
            windows="all",
            defaults={"use_bias": True},
        ),
        "deepseek_v2": _DEEPSEEK,
        "deepseek_v3": _DEEPSEEK,
        "kimi_k2": _DEEPSEEK,
        "glm4_moe": CardFamily(out_bias=False, mlp_bias=False, qk_norm="use_qk_norm"),
        "gpt_oss": CardFamily(
            sinks="all",
            windows="most",
            full_every=2,
            expert_bias=True,
            defaults={"attention_bias": True, "sliding_window": 128},
        ),
        "mimo_v2_flash": CardFamily(out_bias=False, mlp_bias=False, sinks="windows"),
        "minimax": CardFamily(qkv_bias=False, out_bias=False, linear="lightning"),
        "kimi_linear": CardFamily(
            mlp_bias=False,
            linear="kimi",
            names={
                "max_position_embeddings": "model_max_length",
                "num_experts_per_tok": "num_experts_per_token",
                "n_shared_experts": "num_shared_experts",
            },
        ),
    }
)
"""By `model_type`."""
