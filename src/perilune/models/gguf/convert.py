"""Converts a GGUF file to a Hugging Face folder: config.json, safetensors, tokenizer and chat template.

Quantized tensors become float32. Tensors in float32, float16 and bfloat16 keep their type. The conversion
reads and writes parts of one tensor at a time, so it needs little memory.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from perilune.files import fsync_directory, write_json
from perilune.models.gguf.architecture import TargetTensor, model_config, targets
from perilune.models.gguf.header import GgufHeader, GgufTensor, read_header
from perilune.models.gguf.vocabulary import read_tokenizer

Progress = Callable[[int, int], None]
"""Called with the number of bytes written and the total number."""

# By GGUF type: the type in safetensors, and bytes per value. Other types are stored as F32.
_STORED = {"F32": ("F32", 4), "F16": ("F16", 2), "BF16": ("BF16", 2)}
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ROWS_BYTES = 1 << 26  # bytes of float32 values that are converted at once


def convert(path: Path, folder: Path, progress: Progress = lambda done, total: None) -> None:
    """Write the model in the GGUF file `path` to `folder`. config.json is written last.

    Raises:
        RequestError: when the file is malformed or the model is not supported, before anything is written.
    """
    header = read_header(path)
    config = model_config(header)
    wanted = targets(header, config)
    tokenizer = read_tokenizer(header)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = _write_weights(header, wanted, folder / "model.safetensors", progress)
    tokenizer.save(folder)
    raw = {**config.to_hf(), "pad_token_id": tokenizer.pad_token_id, "dtype": dtype}
    write_json(folder / "config.json", raw)


def _write_weights(
    header: GgufHeader, wanted: Mapping[str, TargetTensor], path: Path, progress: Progress
) -> str:
    """Write the safetensors file and return the most frequent dtype of its values."""
    pairs = [(header.tensors[name], target) for name, target in wanted.items()]
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    counts = dict.fromkeys(_DTYPES.values(), 0)
    end = 0
    for tensor, target in pairs:
        dtype, width = _STORED.get(tensor.kind, _STORED["F32"])
        start, end = end, end + width * int(np.prod(target.shape))
        entries[target.name] = {"dtype": dtype, "shape": list(target.shape), "data_offsets": [start, end]}
        counts[_DTYPES[dtype]] += end - start
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    path.unlink(missing_ok=True)  # an interrupted conversion may have left it read-only
    with header.path.open("rb") as source, path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor, target in pairs:
            _copy(source, out, tensor, target)
            progress(out.tell() - len(text) - 8, end)
        out.flush()
        os.fsync(out.fileno())
    fsync_directory(path.parent)
    return max(counts, key=lambda name: counts[name])


def _copy(source: BinaryIO, out: BinaryIO, tensor: GgufTensor, target: TargetTensor) -> None:
    """Convert and copy a tensor, some whole heads or rows at a time."""
    rows = target.shape[0]
    head_rows = rows // target.heads if target.heads else 1
    row_bytes = tensor.nbytes // rows
    values = int(np.prod(target.shape[1:]))
    step = max(1, _ROWS_BYTES // (4 * values * head_rows)) * head_rows
    source.seek(tensor.offset)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        part = _values(source.read(count * row_bytes), tensor.kind).reshape(count, -1)
        if target.heads:
            pairs = part.reshape(count // head_rows, head_rows // 2, 2, -1)
            part = pairs.swapaxes(1, 2).reshape(count, -1)
        out.write(np.ascontiguousarray(part).tobytes())


def _values(data: bytes, kind: str) -> np.ndarray[Any, Any]:
    """Return the values in `data`: float32, or 16 bits for float16 and bfloat16."""
    if kind == "F32":
        return np.frombuffer(data, "<f4")
    if kind in _STORED:
        return np.frombuffer(data, "<u2")
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    blocks = np.frombuffer(data, np.uint8)
    return dequantize(blocks, GGMLQuantizationType[kind])
