"""DecoderConfig against config.json, of both generations of transformers and of hostile hands."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.errors import RequestError
from perilune.models.config import PRESETS, DecoderConfig, Llama3Scaling

LLAMA3 = Llama3Scaling(8.0, 1.0, 4.0, 128)


def raw(**changes: Any) -> dict[str, Any]:
    return {**PRESETS["tiny"].to_hf(), **changes}


@st.composite
def configs(draw: st.DrawFn) -> DecoderConfig:
    architecture = draw(st.sampled_from(["qwen3", "llama"]))
    kv_heads = draw(st.integers(1, 4))
    return DecoderConfig(
        architecture=architecture,
        vocab_size=draw(st.integers(1, 200_000)),
        hidden_size=draw(st.integers(1, 8192)),
        intermediate_size=draw(st.integers(1, 8192)),
        num_layers=draw(st.integers(1, 100)),
        num_heads=kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 64)),
        rope_theta=draw(st.sampled_from([100.0, 1e4, 5e5])),
        rope_scaling=draw(st.sampled_from([None, LLAMA3])),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        mlp_bias=architecture == "llama" and draw(st.booleans()),
        bos_token_id=draw(st.sampled_from([None, 0, 5])),
        eos_token_ids=tuple(draw(st.lists(st.integers(0, 9), max_size=3, unique=True))),
    )


@given(configs())
def test_what_is_written_is_read_back(config: DecoderConfig) -> None:
    assert DecoderConfig.from_hf(config.to_hf()) == config


def test_transformers_4_names_are_read() -> None:
    config = raw(rope_theta=5e5, rope_scaling={"type": "llama3", **_fields(LLAMA3)})
    del config["rope_parameters"]
    read = DecoderConfig.from_hf(config)
    assert read.rope_theta == 5e5
    assert read.rope_scaling == LLAMA3


def test_transformers_5_names_win() -> None:
    config = raw(rope_theta=1.0, rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    assert DecoderConfig.from_hf(config).rope_theta == 77.0


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
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ],
)
def test_what_cannot_work_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        DecoderConfig.from_hf(raw(**changes))


@pytest.mark.parametrize("value", [[], "text", None, 3])
def test_a_config_that_is_no_object(value: Any) -> None:
    with pytest.raises(RequestError, match="not an object"):
        DecoderConfig.from_hf(value)
