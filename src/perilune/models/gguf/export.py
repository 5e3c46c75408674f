"""Writes a Hugging Face folder as a GGUF file, which llama.cpp and transformers can read.

This is the reverse of `convert`. Norms and biases are float32; matrices get the chosen type. One tensor at a
time is in memory.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from perilune.errors import RequestError
from perilune.files import fsync_directory
from perilune.models.checkpoints.loading import check_headers
from perilune.models.checkpoints.tensors import read_tensors
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.config.rope import LinearScaling
from perilune.models.decoder import Decoder
from perilune.models.gguf.architecture import ARCHITECTURES, GgufArchitecture, TargetTensor, layout
from perilune.models.gguf.vocabulary import vocabulary_metadata

if TYPE_CHECKING:
    from gguf import GGUFWriter


_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7}  # values of general.file_type


def export_gguf(folder: Path, out: Path, kind: str) -> None:
    """Write the model in `folder` to the GGUF file `out`, which appears when it is complete.

    Args:
        kind: type of the matrices: "f32", "f16", or "q8_0" with 8 bits per value and a scale per 32 values.

    Raises:
        RequestError: when the export does not support the architecture, the scaling of its rotary embedding
            or the tokenizer.
    """
    from gguf import GGUFWriter

    config, stored = check_headers(Decoder, folder)
    name, architecture = _architecture(config, folder)
    targets = {target.name: (key, target) for key, target in layout(config, architecture).items()}
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    writer = GGUFWriter(partial, name)
    for key, value in (
        _metadata(config, name, kind) | vocabulary_metadata(folder, config.vocab_size)
    ).items():
        _add(writer, key, value)
    ordered = sorted((stored[n] for n in targets), key=lambda n: n.file)  # the order of `read_tensors`
    for entry in ordered:
        key, target = targets[entry.name]
        dtype = _dtype(target, kind)
        writer.add_tensor_info(
            key, target.shape, np.dtype(np.float32), _nbytes(target, dtype), raw_dtype=dtype
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor_name, tensor in read_tensors(ordered):
            target = targets[tensor_name][1]
            writer.write_tensor_data(_stored(tensor, target, _dtype(target, kind)))
        writer.flush()
        writer.close()
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(out)
        fsync_directory(out.parent)
    finally:
        partial.unlink(missing_ok=True)


def _architecture(config: DecoderConfig, folder: Path) -> tuple[str, GgufArchitecture]:
    for name, architecture in ARCHITECTURES.items():
        if architecture.model_type == config.architecture and not config.windows:
            return name, architecture
    supported = ", ".join(kind.model_type for kind in ARCHITECTURES.values())
    windows = " with a sliding window" if config.windows else ""
    raise RequestError(
        f"Perilune cannot write a {config.architecture} model{windows} as GGUF",
        where=str(folder),
        remedy=f"use convert_hf_to_gguf.py of llama.cpp; Perilune writes {supported}",
    )


def _metadata(config: DecoderConfig, name: str, kind: str) -> dict[str, Any]:
    scaling = config.rope.scaling
    if scaling is not None and not isinstance(scaling, LinearScaling):
        what = "Perilune cannot write the scaling of the rotary frequencies as GGUF"
        raise RequestError(what, remedy="use convert_hf_to_gguf.py of llama.cpp")
    metadata: dict[str, Any] = {
        "general.file_type": _FILE_TYPES[kind],
        "general.quantization_version": 2,
        f"{name}.block_count": config.num_layers,
        f"{name}.context_length": config.max_position_embeddings,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.attention.head_count": config.num_heads,
        f"{name}.attention.head_count_kv": config.num_kv_heads,
        f"{name}.attention.key_length": config.head_dim,
        f"{name}.attention.value_length": config.head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{name}.rope.dimension_count": config.head_dim,
        f"{name}.rope.freq_base": config.rope.theta,
        f"{name}.vocab_size": config.vocab_size,
    }
    if scaling is not None:
        metadata[f"{name}.rope.scaling.type"] = "linear"
        metadata[f"{name}.rope.scaling.factor"] = scaling.factor
    return metadata


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    adders: Mapping[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    adders[type(value)](key, value)


def _dtype(target: TargetTensor, kind: str) -> Any:
    """Return the type of a tensor in the file: float32 for vectors, float16 for rows of incomplete blocks."""
    from gguf import GGMLQuantizationType

    if len(target.shape) == 1:
        return GGMLQuantizationType.F32
    if kind == "q8_0" and target.shape[-1] % 32:
        return GGMLQuantizationType.F16
    return GGMLQuantizationType[kind.upper()]


def _nbytes(target: TargetTensor, dtype: Any) -> int:
    from gguf.constants import GGML_QUANT_SIZES

    items, size = GGML_QUANT_SIZES[dtype]
    return int(np.prod(target.shape)) // items * size


def _stored(tensor: torch.Tensor, target: TargetTensor, dtype: Any) -> np.ndarray[Any, Any]:
    from gguf.quants import quantize

    values = tensor.float().numpy()
    if target.heads:
        halves = values.reshape(target.heads, 2, target.shape[0] // target.heads // 2, -1)
        values = halves.swapaxes(1, 2).reshape(target.shape)
    return quantize(np.ascontiguousarray(values), dtype)
