"""The configuration and the Hugging Face tensor names of the model in a GGUF file.

llama.cpp writes tensors under its own names. In files of the architecture "llama" it also interleaves the
rows of the query and key projections, because its rotary embedding pairs neighboring elements. The rotary
embedding of Hugging Face pairs the two halves of a head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from perilune.errors import RequestError
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.gguf.header import GgufHeader

_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_DERIVED = ("rope_freqs.weight",)  # tensors that follow from the configuration


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """The format in which llama.cpp writes the models of one family.

    Attributes:
        model_type: name of the family in config.json.
        norms: Hugging Face names of a layer's norms, by GGUF name. `_PROJECTIONS` is common to all families.
        interleaved: whether the rows of the query and key projections are interleaved.
    """

    model_type: str
    norms: Mapping[str, str] = field(default_factory=lambda: _NORMS)
    interleaved: bool = False


ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "llama": GgufArchitecture("llama", interleaved=True),
        "qwen2": GgufArchitecture("qwen2"),
        "qwen3": GgufArchitecture("qwen3", _NORMS | _QK_NORMS),
        "olmo2": GgufArchitecture("olmo2", _POST_NORMS | _QK_NORMS),
    }
)
"""By `general.architecture`."""


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """A tensor of the Hugging Face folder.

    Attributes:
        shape: as in the model.
        heads: number of heads whose rows are interleaved in the GGUF file; 0 for none.
    """

    name: str
    shape: tuple[int, ...]
    heads: int = 0


def read_architecture(header: GgufHeader) -> GgufArchitecture:
    """Return the architecture that the file names.

    Raises:
        RequestError: when it is missing or not supported.
    """
    name = header.text("general.architecture")
    if name not in ARCHITECTURES:
        raise header.error(
            f"the GGUF architecture {name[:40]!r} is not supported",
            f"use a model with one of {', '.join(ARCHITECTURES)}",
        )
    if header.integer("split.count", 1) > 1:
        raise header.error(
            f"this file is one of {header.integer('split.count')} parts of a model",
            "merge them: llama-gguf-split --merge FIRST_PART OUT.gguf",
        )
    return ARCHITECTURES[name]


def model_config(header: GgufHeader) -> DecoderConfig:
    """Return the configuration of the model, checked against the number of tensors.

    Raises:
        RequestError: when a key is missing or has an impossible value.
    """
    kind, prefix = read_architecture(header), header.text("general.architecture")
    if header.integer(f"{prefix}.expert_count", 0):
        raise header.error("a GGUF file with experts is not supported", "use the safetensors checkpoint")
    layers = header.integer(f"{prefix}.block_count")
    if layers > len(header.tensors):
        raise header.error(
            f"{prefix}.block_count is {layers}, but the file has {len(header.tensors)} tensors"
        )
    width, heads = (
        header.integer(f"{prefix}.embedding_length"),
        header.integer(f"{prefix}.attention.head_count"),
    )
    head_dim = header.integer(f"{prefix}.attention.key_length", width // max(heads, 1))
    raw: dict[str, Any] = {
        "model_type": kind.model_type,
        "vocab_size": len(header.array("tokenizer.ggml.tokens", str)),
        "hidden_size": width,
        "intermediate_size": header.integer(f"{prefix}.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": header.integer(f"{prefix}.attention.head_count_kv", heads),
        "head_dim": header.integer(f"{prefix}.rope.dimension_count", head_dim),
        "rms_norm_eps": header.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "rope_theta": header.number(f"{prefix}.rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(header, prefix),
        "max_position_embeddings": header.integer(f"{prefix}.context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.optional_integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.optional_integer("tokenizer.ggml.eos_token_id"),
    }
    if kind.model_type == "llama":
        raw["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    try:
        return DecoderConfig.from_hf(raw, where=str(header.path))
    except RequestError as error:
        raise header.error(f"the metadata describes an impossible model: {error.what}") from None


def targets(header: GgufHeader, config: DecoderConfig) -> dict[str, TargetTensor]:
    """Return the tensors by their names in the GGUF file, after checking that all exist with these shapes.

    Raises:
        RequestError: naming a tensor that is missing, unknown, or has another shape.
    """
    expected = layout(config, read_architecture(header))
    for name, target in expected.items():
        if name not in header.tensors:
            raise header.error(f"tensor {name} is missing")
        if header.tensors[name].shape != target.shape:
            shape = list(header.tensors[name].shape)
            raise header.error(
                f"tensor {name} has shape {shape}, but the metadata requires {list(target.shape)}"
            )
    for name in header.tensors:
        if name not in expected and name not in _DERIVED:
            raise header.error(f"tensor {name[:80]!r} is not part of a {config.architecture} model")
    return expected


def layout(config: DecoderConfig, kind: GgufArchitecture) -> dict[str, TargetTensor]:
    """Return the tensors of a model by their names in a GGUF file."""
    table = (config.vocab_size, config.hidden_size)
    tensors = {
        "token_embd.weight": TargetTensor("model.embed_tokens.weight", table),
        "output_norm.weight": TargetTensor("model.norm.weight", (config.hidden_size,)),
    }
    if not config.tie_word_embeddings:
        tensors["output.weight"] = TargetTensor("lm_head.weight", table)
    for layer in range(config.num_layers):
        tensors |= _layer_tensors(layer, config, kind)
    return tensors


def _layer_tensors(layer: int, config: DecoderConfig, kind: GgufArchitecture) -> dict[str, TargetTensor]:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, wide = config.hidden_size, config.intermediate_size
    shapes = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (wide, hidden),
        "ffn_up": (wide, hidden),
        "ffn_down": (hidden, wide),
    }
    biased = ["attn_q", "attn_k", "attn_v"] if config.qkv_bias else []
    biased += ["attn_output"] if config.out_bias else []
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if kind.interleaved else {}
    full_width = config.qk_norm == "full"
    norm_sizes = {
        "attn_q_norm": queries if full_width else config.head_dim,
        "attn_k_norm": keys if full_width else config.head_dim,
    }
    tensors: dict[str, TargetTensor] = {}
    for name, target in _PROJECTIONS.items():
        prefix = f"model.layers.{layer}.{target}"
        tensors[f"blk.{layer}.{name}.weight"] = TargetTensor(
            f"{prefix}.weight", shapes[name], heads.get(name, 0)
        )
        if name in biased:
            tensors[f"blk.{layer}.{name}.bias"] = TargetTensor(
                f"{prefix}.bias", shapes[name][:1], heads.get(name, 0)
            )
    for name, target in kind.norms.items():
        tensors[f"blk.{layer}.{name}.weight"] = TargetTensor(
            f"model.layers.{layer}.{target}.weight", (norm_sizes.get(name, hidden),)
        )
    return tensors


def _rope_scaling(header: GgufHeader, prefix: str) -> dict[str, Any] | None:
    """Return the entry `rope_scaling` of config.json."""
    kind = header.text(f"{prefix}.rope.scaling.type", "none")
    if "rope_freqs.weight" in header.tensors:
        raise header.error(
            "scaled rotary frequencies (rope_freqs) are not supported", "use the safetensors checkpoint"
        )
    if kind == "none":
        return None
    if kind != "linear":
        raise header.error(f"{prefix}.rope.scaling.type is {kind[:40]!r}; none and linear are supported")
    return {"rope_type": "linear", "factor": header.number(f"{prefix}.rope.scaling.factor")}
