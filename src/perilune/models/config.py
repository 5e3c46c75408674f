"""DecoderConfig: what makes one decoder differ from another, and its two-way mapping to config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, cast

from perilune.errors import RequestError

Architecture = Literal["qwen3", "llama"]

HF_CLASS = MappingProxyType({"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"})


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1: long wavelengths stretched, short ones kept, a ramp between.

    Attributes:
        factor: how much the longest wavelengths are stretched.
        low_freq_factor: wavelengths above original length / this are stretched fully.
        high_freq_factor: wavelengths below original length / this are kept.
        original_max_position_embeddings: context length before the stretch, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a decoder-only transformer of the Qwen3 or Llama family.

    `attention_bias` puts biases on the q, k, v and o projections, `mlp_bias` on the feed-forward ones.

    Raises:
        RequestError: when the figures cannot make a model.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1e4
    rope_scaling: Llama3Scaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: int = 4096
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise RequestError(f"{name} is {value!r}, not a positive integer", where=_WHERE)
        if self.num_heads % self.num_kv_heads:
            raise RequestError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly",
                where=_WHERE,
            )
        if self.head_dim % 2:
            raise RequestError(
                f"head_dim is {self.head_dim}, and rotary embeddings need an even one",
                where=_WHERE,
            )

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head before the rotary embedding."""
        return self.architecture == "qwen3"

    def replace(self, **changes: Any) -> DecoderConfig:
        """A copy with `changes`."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], *, where: str = "config.json") -> DecoderConfig:
        """Read the content of a Hugging Face config.json, of transformers 4 or 5.

        Raises:
            RequestError: on an architecture, option or value this decoder does not implement.
        """
        read = _Reader(raw, where)
        architecture = read.architecture()
        hidden_size, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
        rope_theta, rope_scaling = read.rope()
        head_dim = 128 if architecture == "qwen3" else hidden_size // max(heads, 1)
        return cls(
            architecture=architecture,
            vocab_size=read.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.integer("intermediate_size"),
            num_layers=read.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=read.integer("num_key_value_heads", heads),
            head_dim=read.integer("head_dim", head_dim),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=read.boolean("tie_word_embeddings", False),
            attention_bias=read.boolean("attention_bias", False),
            mlp_bias=read.boolean("mlp_bias", False),
            max_position_embeddings=read.integer("max_position_embeddings", 2048),
            initializer_range=read.number("initializer_range", 0.02),
            bos_token_id=next(iter(read.token_ids("bos_token_id")), None),
            eos_token_ids=read.token_ids("eos_token_id"),
        )

    @staticmethod
    def end_tokens(raw: Mapping[str, Any], *, where: str) -> tuple[int, ...]:
        """The end-of-sequence ids in the content of a config.json or generation_config.json."""
        return _Reader(raw, where).token_ids("eos_token_id")

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that transformers 4 and 5 both read as this model."""
        scaling = None
        if self.rope_scaling is not None:
            scaling = {"rope_type": "llama3", **dataclasses.asdict(self.rope_scaling)}
        raw: dict[str, Any] = {
            "architectures": [HF_CLASS[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": self.rope_theta},
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": self.initializer_range,
            "use_cache": True,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": _one_or_list(self.eos_token_ids),
        }
        if self.architecture == "llama":
            raw["mlp_bias"] = self.mlp_bias
        else:
            raw["use_sliding_window"] = False
        return raw


_WHERE = "model configuration"
_POSITIVE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "max_position_embeddings",
)  # fmt: skip


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)


class _Reader:
    """Typed look-ups in an untrusted config.json; every complaint names the file and the key."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        if not isinstance(raw, Mapping):
            raise RequestError(f"holds a {type(raw).__name__}, not an object", where=where)
        self.raw, self.where = raw, where

    def wrong(self, key: str, remedy: str = "") -> RequestError:
        return RequestError(f"{key} is {self.raw.get(key)!r}", where=f"{self.where}:{key}", remedy=remedy)

    def architecture(self) -> Architecture:
        kind = self.raw.get("model_type")
        if not isinstance(kind, str) or kind not in HF_CLASS:
            raise self.wrong("model_type", f"use a checkpoint of one of: {', '.join(HF_CLASS)}")
        if self.raw.get("hidden_act", "silu") != "silu":
            raise self.wrong("hidden_act", "only silu is implemented")
        if self.raw.get("use_sliding_window"):
            raise self.wrong("use_sliding_window", "sliding-window attention is not implemented")
        layers = self.raw.get("layer_types") or []
        if not isinstance(layers, list) or any(layer != "full_attention" for layer in layers):
            raise self.wrong("layer_types", "only full attention is implemented")
        if self.raw.get("quantization_config") is not None:
            raise self.wrong("quantization_config", "use the unquantised checkpoint")
        return cast(Architecture, kind)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise RequestError(f"{key} is missing", where=f"{self.where}:{key}")
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(key, "give an integer")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.wrong(key, "give a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "give true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.raw.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.wrong(key, "give a token id or a list of them")
        return tuple(ids)

    def rope(self) -> tuple[float, Llama3Scaling | None]:
        """Base and scaling: in rope_parameters (transformers 5), or rope_theta and rope_scaling (4)."""
        key = "rope_parameters" if self.raw.get("rope_parameters") is not None else "rope_scaling"
        nested = self.raw.get(key)
        if nested is None:
            return self.number("rope_theta", 1e4), None
        if not isinstance(nested, Mapping):
            raise self.wrong(key, "give an object")
        inner = _Reader({"rope_theta": self.raw.get("rope_theta", 1e4), **nested}, f"{self.where}:{key}")
        theta = inner.number("rope_theta", 1e4)
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind == "default":
            return theta, None
        if kind != "llama3":
            raise inner.wrong("rope_type", "rotary scaling of kind default or llama3 is implemented")
        return theta, Llama3Scaling(
            factor=inner.number("factor", 0.0),
            low_freq_factor=inner.number("low_freq_factor", 0.0),
            high_freq_factor=inner.number("high_freq_factor", 0.0),
            original_max_position_embeddings=inner.integer("original_max_position_embeddings"),
        )


PRESETS = MappingProxyType(
    {
        # 0.3 million parameters: learns three-digit addition on one CPU core in under a minute.
        "tiny": DecoderConfig(
            architecture="qwen3",
            vocab_size=98,
            hidden_size=96,
            intermediate_size=256,
            num_layers=3,
            # Four query heads on one key head: decoding computes four rows of scores a product in any case.
            num_heads=4,
            num_kv_heads=1,
            head_dim=32,
            # For short texts; at 10,000 the same cold start takes far more steps.
            rope_theta=100.0,
            max_position_embeddings=4096,
            # 1 / sqrt(hidden size). At the 0.02 of large models the same 300 steps end at 50 times the loss.
            initializer_range=0.1,
        ),
    }
)
