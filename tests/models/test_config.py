"""DecoderConfig from config.json: formats of transformers 4 and 5, and invalid values."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.errors import RequestError
from perilune.models.config.decoder_config import PRESETS, DecoderConfig
from perilune.models.config.families import DECODER_FAMILIES
from perilune.models.config.layer_kinds import DeltaRule, Experts, Latent
from perilune.models.config.multipliers import Multipliers
from perilune.models.config.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling

LLAMA3 = Llama3Scaling(8.0, 1.0, 4.0, 128)
YARN = YarnScaling(4.0, 4096, mscale=1.0, mscale_all_dim=0.7)


def raw(**changes: Any) -> dict[str, Any]:
    return {**PRESETS["tiny"].to_hf(), **changes}


@st.composite
def configs(draw: st.DrawFn) -> DecoderConfig:
    architecture = draw(st.sampled_from(list(DECODER_FAMILIES)))
    options = DECODER_FAMILIES[architecture].options
    kv_heads, layers = draw(st.integers(1, 4)), draw(st.integers(1, 50))
    latent = draw(latents(options)) if "kv_lora_rank" in options else None

    def option(key: str, values: st.SearchStrategy[Any], default: Any = None) -> Any:
        return draw(values) if key in options else default

    ropes = st.builds(
        Rope, st.sampled_from([100.0, 1e4, 5e5]), st.sampled_from([None, LLAMA3, LinearScaling(8.0), YARN])
    )
    fraction = option("partial_rotary_factor", st.sampled_from([0.5, 1.0]), 1.0)
    mixture = option("num_experts", experts(layers, options))
    one_size = DECODER_FAMILIES[architecture].shares_expert_width
    return DecoderConfig(
        architecture=architecture,
        vocab_size=draw(st.integers(1, 200_000)),
        hidden_size=draw(st.integers(1, 8192)),
        intermediate_size=mixture.intermediate_size if one_size else draw(st.integers(1, 8192)),
        num_layers=layers,
        num_heads=kv_heads * (1 if latent else draw(st.integers(1, 4))),
        num_kv_heads=kv_heads,
        head_dim=latent.key_size + latent.rotary_size if latent else 4 * draw(st.integers(1, 32)),
        rope=replace(draw(ropes), fraction=fraction),
        local_rope=draw(ropes) if DECODER_FAMILIES[architecture].local_rope else None,
        windows=draw(windows(architecture, layers)),
        query_pre_attn_scalar=option("query_pre_attn_scalar", st.sampled_from([None, 1, 300])),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=option("attention_bias", st.booleans(), False)
        or option("qkv_bias", st.booleans(), False),
        use_qk_norm=option("use_qk_norm", st.booleans(), False),
        mlp_bias=option("mlp_bias", st.booleans(), False),
        logit_softcap=option("final_logit_softcapping", st.sampled_from([None, 30.0])),
        score_softcap=option("attn_logit_softcapping", st.sampled_from([None, 50.0])),
        unrotated=option("no_rope_layers", st.sampled_from([(), (0,), tuple(range(layers))]), ()),
        multipliers=option("logits_scaling", st.builds(Multipliers, *[st.sampled_from([0.3, 1.0])] * 4)),
        experts=mixture,
        latent=latent,
        delta=draw(deltas(layers)) if "linear_num_value_heads" in options else None,
        bos_token_id=draw(st.sampled_from([None, 0, 5])),
        eos_token_ids=tuple(draw(st.lists(st.integers(0, 9), max_size=3, unique=True))),
    )


@st.composite
def windows(draw: st.DrawFn, architecture: str, layers: int) -> tuple[int | None, ...]:
    family, size = DECODER_FAMILIES[architecture], draw(st.sampled_from([None, 1, 4096]))
    if "sliding_window" not in family.options or size is None:
        return ()
    some = draw(st.lists(st.booleans(), min_size=layers, max_size=layers).filter(any))
    return tuple(size if family.windows == "all" or windowed else None for windowed in some)


@st.composite
def experts(draw: st.DrawFn, layers: int, options: frozenset[str]) -> Experts:
    groups = draw(st.integers(1, 8)) if "n_group" in options else 1
    count, kept, inner = (
        groups * draw(st.integers(1, 50)),
        draw(st.integers(1, groups)),
        draw(st.integers(1, 4000)),
    )
    shared = draw(st.integers(0, 3)) * inner
    dense = draw(st.sets(st.integers(0, layers - 1)))
    if "first_k_dense_replace" in options:
        dense = set(range(len(dense)))
    elif "mlp_only_layers" not in options:
        dense = set()
    return Experts(
        count=count,
        per_token=draw(st.integers(1, count // groups * kept)),
        intermediate_size=inner,
        normalized=draw(st.booleans()) if "norm_topk_prob" in options else True,
        dense_layers=tuple(sorted(dense)),
        shared_size=shared if options & {"n_shared_experts", "shared_expert_intermediate_size"} else 0,
        groups=groups,
        groups_per_token=kept,
        scale=draw(st.sampled_from([1.0, 2.5])) if "routed_scaling_factor" in options else 1.0,
    )


@st.composite
def deltas(draw: st.DrawFn, layers: int) -> DeltaRule:
    chosen = draw(st.sets(st.integers(0, layers - 2))) if layers > 1 else ()
    heads = draw(st.integers(1, 8))
    sizes = draw(st.tuples(*[st.integers(1, 200)] * 3))
    return DeltaRule(tuple(sorted(chosen)), heads, heads * draw(st.integers(1, 3)), *sizes)


@st.composite
def latents(draw: st.DrawFn, options: frozenset[str]) -> Latent:
    rank, half, key_size, value_size = draw(st.tuples(*[st.integers(1, 200)] * 4))
    interleaved = "rope_interleave" not in options or draw(st.booleans())
    return Latent(rank, 2 * half, key_size, value_size, draw(st.sampled_from([None, 7])), interleaved)


@given(configs())
def test_config_round_trips_through_hf_format(config: DecoderConfig) -> None:
    assert DecoderConfig.from_hf(config.to_hf()) == config


def gemma(**changes: Any) -> dict[str, Any]:
    """A config.json as written by transformers 4, which omits Gemma 3's defaults."""
    sizes = {"vocab_size": 98, "hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4}
    layers = {"num_hidden_layers": 7, "sliding_window": 512, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    return {"model_type": "gemma3_text", **sizes, **layers, **changes}


def test_gemma3_config_of_transformers_4_is_read() -> None:
    config = DecoderConfig.from_hf(gemma(rope_scaling={"rope_type": "linear", "factor": 8.0}))
    assert config.windows == (512, 512, 512, 512, 512, None, 512)
    assert config.layer_rope(5) == Rope(1e6, LinearScaling(8.0))
    assert config.layer_rope(6) == Rope(1e4)
    assert config.head_dim == 256
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "sliding_attention"),
    ],
)
def test_unsupported_gemma3_options_are_rejected(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        DecoderConfig.from_hf(gemma(**changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts": 0}, "experts.count"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "5 of 4 experts"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ],
)
def test_invalid_expert_options_are_rejected(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        DecoderConfig.from_hf(raw(model_type="qwen3_moe", **changes))


GLM = {
    "model_type": "glm4_moe",
    "n_routed_experts": 12,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 6,
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_group": 5}, "12 experts cannot be divided into 5 equal groups"),
        ({"topk_group": 5}, "a token uses 5 of 4 groups of experts"),
        ({"num_experts_per_tok": 7}, "a token uses 7 of 6 experts"),
        ({"n_shared_experts": -1}, "shared_size is -"),
        ({"moe_layer_freq": 0}, "moe_layer_freq"),
        ({"partial_rotary_factor": 2.0}, "rotary embeddings cannot rotate 2 of"),
        ({"topk_method": "group_limited_greedy"}, "topk_method"),
    ],
)
def test_invalid_expert_group_options_are_rejected(changes: dict[str, Any], named: str) -> None:
    sizes = {**raw(), "rope_parameters": None}
    assert DecoderConfig.from_hf(sizes | GLM).experts is not None
    with pytest.raises(RequestError, match=named):
        DecoderConfig.from_hf(sizes | GLM | changes)


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8}, "layer_types"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("granite", {"logits_scaling": 0}, "logits_scaling"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type"),
    ],
)
def test_unsupported_family_options_are_rejected_by_name(
    kind: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(RequestError, match=named):
        DecoderConfig.from_hf(raw(model_type=kind, **changes))


def test_num_local_experts_is_read_as_num_experts() -> None:
    config = DecoderConfig.from_hf(raw(model_type="qwen3_moe", num_local_experts=16))
    assert config.experts is not None
    assert config.experts.count == 16


def test_replace_rejects_options_that_the_family_lacks() -> None:
    with pytest.raises(RequestError, match="a qwen3 model has no mlp_bias"):
        PRESETS["tiny"].replace(mlp_bias=True)
    with pytest.raises(RequestError, match="cannot have windows"):
        PRESETS["tiny"].replace(windows=(8, 9, None))


@pytest.mark.parametrize("kind", DECODER_FAMILIES)
def test_missing_keys_have_the_defaults_of_transformers(kind: str) -> None:
    import transformers

    changes = {"num_attention_heads": 64} if kind == "glm4_moe" else {}  # its default splits no head evenly
    whole = transformers.AutoConfig.for_model(kind, **changes).to_dict()
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    theirs = DecoderConfig.from_hf(whole)
    ours = DecoderConfig.from_hf({"model_type": kind, **{key: whole[key] for key in sizes if key in whole}})
    for name in ("rope", "local_rope", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "head_dim"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_transformers_4_rope_names_are_read() -> None:
    config = raw(rope_theta=5e5, rope_scaling={"type": "llama3", **_fields(LLAMA3)})
    del config["rope_parameters"]
    read = DecoderConfig.from_hf(config)
    assert read.rope == Rope(5e5, LLAMA3)


def test_transformers_5_rope_names_take_precedence() -> None:
    config = raw(rope_theta=1.0, rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    assert DecoderConfig.from_hf(config).rope == Rope(77.0)


def _fields(scaling: Llama3Scaling) -> dict[str, Any]:
    return {name: getattr(scaling, name) for name in scaling.__slots__}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"model_type": ["qwen3"]}, "model_type"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "96"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": -96}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "key-value heads"),
        ({"head_dim": 31}, "head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": 1}, "use_sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 2.5}, "sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, "sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ({"layer_types": 3}, "layer_types"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "original_max_position_embeddings"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ],
)
def test_invalid_config_values_are_rejected_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        DecoderConfig.from_hf(raw(**changes))


def test_kimi_k2_is_read_as_deepseek_v3() -> None:
    sizes = {"vocab_size": 98, "hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4}
    kimi = {"model_type": "kimi_k2", **sizes, "num_hidden_layers": 2, "first_k_dense_replace": 2}
    config = DecoderConfig.from_hf(kimi)
    assert config.architecture == "deepseek_v3"
    assert config.latent == Latent(512, 64, 128, 128, 1536)
    assert config.experts is not None
    assert config.experts.count == 256


@pytest.mark.parametrize("value", [[], "text", None, 3])
def test_config_that_is_not_an_object_is_rejected(value: Any) -> None:
    with pytest.raises(RequestError, match="not an object"):
        DecoderConfig.from_hf(value)
