"""The table of model families.

Properties in which models of a family differ (sizes, windows, rotary bases) are read from config.json. The
decoder implements the families in `DECODER_FAMILIES`. For the other families, the table has what a
`ModelCard` needs to count parameters, cache and compute. Tests compare each parameter count with the model
that transformers builds.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from perilune.models.config.family import Family

_WINDOW_OFF = {"use_sliding_window": False, "sliding_window": 4096}
_TIED = {"tie_word_embeddings": True}
_EXPERTS = frozenset({"num_experts", "num_experts_per_tok", "moe_intermediate_size"})
_NORMALIZED_EXPERTS = _EXPERTS | {"norm_topk_prob"}
_SOME_SPARSE = frozenset({"decoder_sparse_step", "mlp_only_layers"})
_LINEAR_SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_LATENT_SIZES = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DEEPSEEK_EXPERTS = {
    "num_experts": 256,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
}
_DEEPSEEK_OPTIONS = _DEEPSEEK_EXPERTS.keys() | {"num_experts_per_tok", "num_nextn_predict_layers"}
_GEMMA_SIZES = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

_MISTRAL = Family(
    "MistralForCausalLM",
    qkv_bias=False,
    out_bias=False,
    windows="all",
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
_QWEN_3 = Family(
    "Qwen3ForCausalLM", qk_norm="head", windows="upper", defaults=_WINDOW_OFF | {"head_dim": 128}
)
_QWEN_3_5 = Family(
    "Qwen3_5ForCausalLM",
    own_options=_LINEAR_SIZES.keys() | {"layer_types", "partial_rotary_factor"},
    norm_offset=True,
    mlp_bias=False,
    qk_norm="head",
    output_gate=True,
    linear="delta",
    defaults={**_LINEAR_SIZES, "full_attention_interval": 4, "head_dim": 256, "partial_rotary_factor": 0.25},
)
_QWEN_3_5_MOE = replace(
    _QWEN_3_5,
    hf_class="Qwen3_5MoeForCausalLM",
    own_options=_QWEN_3_5.own_options | _EXPERTS | {"shared_expert_intermediate_size"},
    shared_gate=True,
    modules={"shared_experts": "shared_expert"},
    defaults={
        **_QWEN_3_5.defaults,
        "intermediate_size": 512,  # unused: all layers have experts
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
    own_options=_QWEN_3_5_MOE.own_options | _NORMALIZED_EXPERTS | _SOME_SPARSE,
    linear_grouped=True,
    modules={
        "shared_experts": "shared_expert",
        **dict.fromkeys(["in_proj_qkv", "in_proj_z"], "in_proj_qkvz"),
        **dict.fromkeys(["in_proj_b", "in_proj_a"], "in_proj_ba"),
    },
    defaults={**_QWEN_3_5_MOE.defaults, "num_experts": 512, "num_experts_per_tok": 10},
)
_GEMMA = Family(
    "GemmaForCausalLM",
    activation="gelu_pytorch_tanh",
    norm_offset=True,
    scaled_embeddings=True,
    defaults=_TIED | {"head_dim": 256, "max_position_embeddings": 8192},
)
_OLMO_2 = Family(
    "Olmo2ForCausalLM", pre_norm=False, post_norm=True, qk_norm="full", defaults={"rms_norm_eps": 1e-5}
)
_DEEPSEEK = Family(
    "DeepseekV3ForCausalLM",
    own_options=_DEEPSEEK_OPTIONS | _LATENT_SIZES.keys() | {"rope_interleave"},
    mlp_bias=False,
    router="sigmoid",
    correction=True,
    names={"num_experts": "n_routed_experts"},
    defaults={**_DEEPSEEK_EXPERTS, **_LATENT_SIZES},
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
        "llama": Family("LlamaForCausalLM", own_options={"mlp_bias"}),
        "granite": Family(
            "GraniteForCausalLM",
            own_options={"mlp_bias", "embedding_multiplier", "residual_multiplier"}
            | {"attention_multiplier", "logits_scaling"},
        ),
        "smollm3": Family(
            "SmolLM3ForCausalLM",
            own_options={"mlp_bias", "no_rope_layers"},
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
            own_options=_EXPERTS,
            names={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
            modules={"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
            defaults={
                "num_key_value_heads": 8,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
                "rope_theta": 1e6,
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 131072,
            },
        ),
        "phi3": Family(
            "Phi3ForCausalLM",
            own_options={"partial_rotary_factor"},
            qkv_bias=False,
            out_bias=False,
            windows="all",
            modules=dict.fromkeys(["q_proj", "k_proj", "v_proj"], "qkv_proj")
            | dict.fromkeys(["gate_proj", "up_proj"], "gate_up_proj"),
            defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        ),
        "qwen2": Family(
            "Qwen2ForCausalLM", qkv_bias=True, out_bias=False, windows="upper", defaults=_WINDOW_OFF
        ),
        "qwen2_moe": Family(
            "Qwen2MoeForCausalLM",
            own_options=_NORMALIZED_EXPERTS | _SOME_SPARSE | {"shared_expert_intermediate_size"},
            qkv_bias="qkv_bias",
            out_bias=False,
            windows="listed",
            shared_gate=True,
            modules={"shared_experts": "shared_expert"},
            defaults=_WINDOW_OFF
            | {
                "qkv_bias": True,
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
            },
        ),
        "qwen3": _QWEN_3,
        "qwen3_moe": replace(
            _QWEN_3,
            hf_class="Qwen3MoeForCausalLM",
            own_options=_NORMALIZED_EXPERTS | _SOME_SPARSE,
            windows="all",
            defaults=_WINDOW_OFF,
        ),
        "qwen3_next": _QWEN_NEXT,
        "qwen3_5_text": _QWEN_3_5,
        "qwen3_5_moe_text": _QWEN_3_5_MOE,
        "gemma": _GEMMA,
        "gemma2": replace(
            _GEMMA,
            hf_class="Gemma2ForCausalLM",
            own_options={"query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping"},
            post_norm=True,
            windows="most",
            defaults={
                **_GEMMA.defaults,
                **_GEMMA_SIZES,
                "vocab_size": 256000,
                "sliding_window_pattern": 2,
                "final_logit_softcapping": 30.0,
                "attn_logit_softcapping": 50.0,
            },
        ),
        "gemma3_text": replace(
            _GEMMA,
            hf_class="Gemma3ForCausalLM",
            own_options={"query_pre_attn_scalar", "final_logit_softcapping", "rope_local_base_freq"},
            post_norm=True,
            qk_norm="head",
            windows="most",
            local_rope=True,
            defaults={
                **_TIED,
                **_GEMMA_SIZES,
                "vocab_size": 262208,
                "sliding_window_pattern": 6,
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "max_position_embeddings": 131072,
            },
        ),
        "olmo": Family(norm_vectors=0),
        "olmo2": _OLMO_2,
        "olmo3": replace(
            _OLMO_2,
            hf_class="Olmo3ForCausalLM",
            windows="most",
            local_rope=True,
            defaults={
                **_OLMO_2.defaults,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
                "rope_theta": 5e5,
            },
        ),
        "olmoe": Family(
            "OlmoeForCausalLM",
            own_options=_NORMALIZED_EXPERTS,
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
        "deepseek_v2": Family(
            "DeepseekV2ForCausalLM",
            own_options=_DEEPSEEK_OPTIONS | _LATENT_SIZES.keys() | {"mlp_bias"},
            names=_DEEPSEEK.names,
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
        ),
        "deepseek_v3": _DEEPSEEK,
        "kimi_k2": _DEEPSEEK,
        "glm4_moe": Family(
            "Glm4MoeForCausalLM",
            own_options=_DEEPSEEK_OPTIONS | {"use_qk_norm", "partial_rotary_factor"},
            out_bias=False,
            mlp_bias=False,
            qk_norm="use_qk_norm",
            router="sigmoid",
            correction=True,
            names=_DEEPSEEK.names,
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
            own_options=_EXPERTS,
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
                "rope_scaling": _GPT_OSS_ROPE,
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
"""All families, by `model_type`."""

SAME_FAMILY: Mapping[str, str] = MappingProxyType({"kimi_k2": "deepseek_v3"})
"""Values of `model_type` that transformers does not know, with the equal family that it knows."""

DECODER_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {name: family for name, family in FAMILIES.items() if family.hf_class and name not in SAME_FAMILY}
)
"""The families that the decoder implements, by `model_type`."""
