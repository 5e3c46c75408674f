"""Model families: what all models of one `model_type` share.

Everything that differs between models of a family (sizes, windows, rotary bases) is read from config.json.
The decoder computes the families in `DECODER_FAMILIES`. For the others, the table has what a `ModelCard`
needs to count parameters, cache and compute; tests compare each count with the model that transformers
builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

Architecture = Literal[
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "smollm3",
    "granite",
    "olmo2",
    "olmo3",
    "olmoe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
]
"""The `model_type` of a family that the decoder computes."""

Bias = bool | str
"""Whether there is a bias, or the key of config.json that says so."""


@dataclass(frozen=True, slots=True)
class Family:
    """Properties that all models of a family share. The defaults are Llama's.

    Attributes:
        hf_class: the class in transformers, for config.json.
        options: keys of config.json that the decoder reads and writes besides those of every family.
        activation: the activation of the feed-forward gate; "clamped" is that of gpt-oss, which bounds both
            inputs and adds one to the second.
        norm_offset: a norm weight w multiplies by 1 + w, so that zero is neutral.
        scaled_embeddings: embeddings are multiplied by sqrt(hidden_size).
        pre_norm: the input of attention and feed-forward is normalised.
        post_norm: the output of attention and feed-forward is normalised before it is added.
        parallel: attention and feed-forward share one norm and run side by side.
        norm_vectors: learned vectors per norm: 1, 2 with a bias, or 0.
        qkv_bias, out_bias, mlp_bias: biases of the attention inputs, attention output and feed-forward.
        matrices: matrices of a feed-forward network; 3 when it has a gate.
        qk_norm: queries and keys are normalised before rotation: "head" by head, over the "full" width of all
            heads, or head by head when the key of this name is true.
        output_gate: the attention output is gated by as many numbers as there are queries.
        sinks: each head learns a logit for attending to nothing: in all layers, or in those with a window.
        windows: layers with a sliding window when `layer_types` is missing: "all"; the "upper" ones, from
            `max_window_layers` on; "most", all but every n-th, n being `sliding_window_pattern`; or "listed",
            which refuses such a config.
        local_rope: layers with a window have a rotary embedding of their own.
        linear: kind of linear attention, in layers that `layer_types` or `full_attention_interval` select.
        linear_grouped: the inputs of linear attention are stacked by key head, not by kind.
        router: what turns the router's logits into scores of the experts.
        correction: a bias of each expert is added to its score for the choice, and not for the weight.
        expert_bias: experts and their router have biases.
        fused_experts: all experts of a layer are one tensor, as in gpt-oss.
        shared_gate: the shared expert has a gate.
        positions: position embeddings are learned.
        names: the family's own names for keys that other families call differently.
        modules: the family's own names for modules that other families call differently. Modules with the
            same name are one.
        defaults: values that transformers assumes for missing keys, where they differ from the general ones.
    """

    hf_class: str = ""
    options: frozenset[str] = frozenset({"attention_bias"})
    activation: Literal["silu", "gelu_pytorch_tanh", "clamped"] = "silu"
    norm_offset: bool = False
    scaled_embeddings: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    parallel: bool = False
    norm_vectors: int = 1
    qkv_bias: Bias = "attention_bias"
    out_bias: Bias = "attention_bias"
    mlp_bias: Bias = "mlp_bias"
    matrices: int = 3
    qk_norm: str = ""
    output_gate: bool = False
    sinks: Literal["", "all", "windows"] = ""
    windows: Literal["none", "all", "upper", "most", "listed"] = "none"
    local_rope: bool = False
    linear: Literal["", "delta", "lightning", "kimi"] = ""
    linear_grouped: bool = False
    router: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False
    expert_bias: bool = False
    fused_experts: bool = False
    shared_gate: bool = False
    positions: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def norms(self) -> int:
        """Norms over the hidden size in one layer."""
        return 1 if self.parallel else 2 * (self.pre_norm + self.post_norm)

    def read(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The content of a config.json under the general names, with the family's defaults."""
        names = {name: raw[theirs] for name, theirs in self.names.items() if raw.get(theirs) is not None}
        return {**self.defaults, **raw, **names}

    @property
    def one_width(self) -> bool:
        """Whether `intermediate_size` is the width of experts."""
        return self.names.get("moe_intermediate_size") == "intermediate_size"

    def module(self, name: str) -> str:
        """The family's name of a module."""
        return self.modules.get(name, name)


_WINDOW_OPTIONS = frozenset({"use_sliding_window", "sliding_window", "layer_types"})
_MIXTURE_OPTIONS = frozenset({"num_experts", "num_experts_per_tok", "moe_intermediate_size"})
_EXPERT_OPTIONS = _MIXTURE_OPTIONS | {"norm_topk_prob"}
_SPARSE_OPTIONS = frozenset({"decoder_sparse_step", "mlp_only_layers"})
_ROUTED_OPTIONS = _EXPERT_OPTIONS | {
    "first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor", "n_shared_experts",
    "num_nextn_predict_layers",
}  # fmt: skip
_GEMMA_OPTIONS = frozenset({"rope_local_base_freq", "query_pre_attn_scalar", "final_logit_softcapping"})
_MULTIPLIERS = frozenset(
    {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}
)
_NO_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
_TIED = {"tie_word_embeddings": True}

_MISTRAL = Family(
    hf_class="MistralForCausalLM",
    options=frozenset({"sliding_window"}),
    qkv_bias=False,
    out_bias=False,
    windows="all",
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
_LATENT_OPTIONS = frozenset(
    {"kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "attention_bias"}
)
_DEEPSEEK = Family(
    "DeepseekV3ForCausalLM",
    options=_ROUTED_OPTIONS | _LATENT_OPTIONS | {"rope_interleave"},
    mlp_bias=False,
    router="sigmoid",
    correction=True,
    names={"num_experts": "n_routed_experts"},
    defaults={
        "num_experts": 256,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
)
_DEEPSEEK_V2 = Family(
    "DeepseekV2ForCausalLM",
    options=_ROUTED_OPTIONS | _LATENT_OPTIONS | {"mlp_bias"},
    names={"num_experts": "n_routed_experts"},
    defaults={
        **_DEEPSEEK.defaults,
        "num_experts": 64,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
    },
)
_DELTA_OPTIONS = frozenset(
    {
        "layer_types", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
        "linear_num_key_heads", "linear_num_value_heads", "attention_bias", "partial_rotary_factor",
    }
)  # fmt: skip
_QWEN_3_5 = Family(
    "Qwen3_5ForCausalLM",
    options=_DELTA_OPTIONS,
    norm_offset=True,
    mlp_bias=False,
    qk_norm="head",
    output_gate=True,
    linear="delta",
    defaults={
        "full_attention_interval": 4,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
)
_QWEN_3_5_MOE = replace(
    _QWEN_3_5,
    hf_class="Qwen3_5MoeForCausalLM",
    options=_DELTA_OPTIONS | _MIXTURE_OPTIONS | {"shared_expert_intermediate_size"},
    shared_gate=True,
    modules={"shared_experts": "shared_expert"},
    defaults={
        **_QWEN_3_5.defaults,
        "intermediate_size": 512,  # of no layer: all have experts
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 512,
    },
)
_QWEN_NEXT = replace(
    _QWEN_3_5_MOE,
    hf_class="Qwen3NextForCausalLM",
    options=_DELTA_OPTIONS | _EXPERT_OPTIONS | _SPARSE_OPTIONS | {"shared_expert_intermediate_size"},
    linear_grouped=True,
    modules={
        "shared_experts": "shared_expert",
        "in_proj_qkv": "in_proj_qkvz",
        "in_proj_z": "in_proj_qkvz",
        "in_proj_b": "in_proj_ba",
        "in_proj_a": "in_proj_ba",
    },
    defaults={**_QWEN_3_5_MOE.defaults, "num_experts": 512, "num_experts_per_tok": 10},
)
_GPT = Family(
    norm_vectors=2,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    matrices=2,
    positions=True,
    names={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
    },
    defaults=_TIED,
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family("LlamaForCausalLM", options=frozenset({"attention_bias", "mlp_bias"})),
        "granite": Family("GraniteForCausalLM", options=_MULTIPLIERS | {"attention_bias", "mlp_bias"}),
        "smollm3": Family(
            "SmolLM3ForCausalLM",
            options=_WINDOW_OPTIONS | {"attention_bias", "mlp_bias", "no_rope_layers"},
            windows="listed",
            defaults=_TIED
            | {
                "use_sliding_window": False,
                "no_rope_layer_interval": 4,
                "num_key_value_heads": 4,
                "rope_theta": 2e6,
                "max_position_embeddings": 32768,
            },
        ),
        "mistral": _MISTRAL,
        "mixtral": replace(
            _MISTRAL,
            hf_class="MixtralForCausalLM",
            options=_MIXTURE_OPTIONS | {"sliding_window"},
            names={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
            modules={"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
            defaults={
                "num_key_value_heads": 8,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 131072,
            },
        ),
        "phi3": Family(
            "Phi3ForCausalLM",
            options=frozenset({"sliding_window", "partial_rotary_factor"}),
            qkv_bias=False,
            out_bias=False,
            windows="all",
            modules=dict.fromkeys(["q_proj", "k_proj", "v_proj"], "qkv_proj")
            | dict.fromkeys(["gate_proj", "up_proj"], "gate_up_proj"),
            defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        ),
        "qwen2": Family(
            "Qwen2ForCausalLM",
            options=_WINDOW_OPTIONS,
            qkv_bias=True,
            out_bias=False,
            windows="upper",
            defaults=_NO_WINDOW,
        ),
        "qwen2_moe": Family(
            "Qwen2MoeForCausalLM",
            options=_WINDOW_OPTIONS
            | _EXPERT_OPTIONS
            | _SPARSE_OPTIONS
            | {"qkv_bias", "shared_expert_intermediate_size"},
            qkv_bias="qkv_bias",
            out_bias=False,
            windows="listed",
            shared_gate=True,
            modules={"shared_experts": "shared_expert"},
            defaults=_NO_WINDOW
            | {
                "qkv_bias": True,
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
            },
        ),
        "qwen3": Family(
            "Qwen3ForCausalLM",
            options=_WINDOW_OPTIONS | {"attention_bias"},
            qk_norm="head",
            windows="upper",
            defaults=_NO_WINDOW | {"head_dim": 128},
        ),
        "qwen3_moe": Family(
            "Qwen3MoeForCausalLM",
            options=_WINDOW_OPTIONS | _EXPERT_OPTIONS | _SPARSE_OPTIONS | {"attention_bias"},
            qk_norm="head",
            windows="all",
            defaults=_NO_WINDOW,
        ),
        "qwen3_next": _QWEN_NEXT,
        "qwen3_5_text": _QWEN_3_5,
        "qwen3_5_moe_text": _QWEN_3_5_MOE,
        "gemma": Family(
            "GemmaForCausalLM",
            activation="gelu_pytorch_tanh",
            norm_offset=True,
            scaled_embeddings=True,
            defaults=_TIED | {"head_dim": 256, "max_position_embeddings": 8192},
        ),
        "gemma2": Family(
            "Gemma2ForCausalLM",
            options=frozenset(
                {"attention_bias", "sliding_window", "layer_types", "query_pre_attn_scalar"}
                | {"final_logit_softcapping", "attn_logit_softcapping"}
            ),
            activation="gelu_pytorch_tanh",
            norm_offset=True,
            scaled_embeddings=True,
            post_norm=True,
            windows="most",
            defaults=_TIED
            | {
                "vocab_size": 256000,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
                "sliding_window_pattern": 2,
                "final_logit_softcapping": 30.0,
                "attn_logit_softcapping": 50.0,
                "max_position_embeddings": 8192,
            },
        ),
        "gemma3_text": Family(
            "Gemma3ForCausalLM",
            options=_GEMMA_OPTIONS | {"attention_bias", "sliding_window", "layer_types"},
            activation="gelu_pytorch_tanh",
            norm_offset=True,
            scaled_embeddings=True,
            post_norm=True,
            qk_norm="head",
            windows="most",
            local_rope=True,
            defaults=_TIED
            | {
                "vocab_size": 262208,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
                "sliding_window_pattern": 6,
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "max_position_embeddings": 131072,
            },
        ),
        "olmo": Family(norm_vectors=0),
        "olmo2": Family(
            "Olmo2ForCausalLM",
            pre_norm=False,
            post_norm=True,
            qk_norm="full",
            defaults={"rms_norm_eps": 1e-5},
        ),
        "olmo3": Family(
            "Olmo3ForCausalLM",
            options=frozenset({"attention_bias", "sliding_window", "layer_types"}),
            pre_norm=False,
            post_norm=True,
            qk_norm="full",
            windows="most",
            local_rope=True,
            defaults={
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
                "rope_theta": 5e5,
                "rms_norm_eps": 1e-5,
            },
        ),
        "olmoe": Family(
            "OlmoeForCausalLM",
            options=_EXPERT_OPTIONS | {"attention_bias"},
            qk_norm="full",
            names={"moe_intermediate_size": "intermediate_size"},
            defaults={"num_experts": 64, "rms_norm_eps": 1e-5},
        ),
        "cohere2": Family(
            parallel=True,
            windows="most",
            defaults=_TIED | {"sliding_window": 4096, "sliding_window_pattern": 4},
        ),
        "gpt2": _GPT,
        "gpt_bigcode": replace(_GPT, defaults=_TIED | {"multi_query": True}),
        "gpt_neox": Family(norm_vectors=2, mlp_bias=True, matrices=2, defaults={"attention_bias": True}),
        "starcoder2": Family(
            norm_vectors=2,
            qkv_bias="use_bias",
            out_bias="use_bias",
            mlp_bias="use_bias",
            matrices=2,
            windows="all",
            defaults=_TIED | {"use_bias": True},
        ),
        "deepseek_v2": _DEEPSEEK_V2,
        "deepseek_v3": _DEEPSEEK,
        "kimi_k2": _DEEPSEEK,
        "glm4_moe": Family(
            "Glm4MoeForCausalLM",
            options=_ROUTED_OPTIONS | {"attention_bias", "use_qk_norm", "partial_rotary_factor"},
            out_bias=False,
            mlp_bias=False,
            qk_norm="use_qk_norm",
            router="sigmoid",
            correction=True,
            names={"num_experts": "n_routed_experts"},
            defaults={
                "num_experts": 128,
                "moe_intermediate_size": 1408,
                "n_shared_experts": 1,
                "first_k_dense_replace": 1,
                "norm_topk_prob": True,
                "partial_rotary_factor": 0.5,
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 131072,
            },
        ),
        "gpt_oss": Family(
            "GptOssForCausalLM",
            options=_MIXTURE_OPTIONS | {"attention_bias", "sliding_window", "layer_types"},
            activation="clamped",
            sinks="all",
            windows="most",
            expert_bias=True,
            fused_experts=True,
            names={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
            modules={"gate": "router"},
            defaults={
                "vocab_size": 201088,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "num_experts": 128,
                "num_experts_per_tok": 4,
                "norm_topk_prob": True,
                "attention_bias": True,
                "sliding_window": 128,
                "sliding_window_pattern": 2,
                "rope_theta": 150000.0,
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 131072,
            },
        ),
        "mimo_v2_flash": Family(out_bias=False, mlp_bias=False, sinks="windows"),
        "minimax": Family(qkv_bias=False, out_bias=False, linear="lightning"),
        "kimi_linear": Family(
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

SAME_FAMILY: Mapping[str, Architecture] = MappingProxyType({"kimi_k2": "deepseek_v3"})
"""Other names of families that the decoder computes; transformers does not know them."""

DECODER_FAMILIES: Mapping[Architecture, Family] = MappingProxyType(
    {name: FAMILIES[name] for name in get_args(Architecture)}
)
"""The families that the decoder computes."""
