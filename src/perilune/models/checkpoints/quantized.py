"""Quantized tensors of published checkpoints, converted to floating point as they are read.

* MXFP4 (OCP Microscaling Formats 1.0; the experts of gpt-oss): blocks of 32 numbers E2M1, two in a byte, the
  first in the low bits. A block has a power of two as its scale. The numbers are exact in bfloat16.
* FP8 (DeepSeek-V3, arXiv 2412.19437; Qwen3-FP8): numbers E4M3, with a scale for each block of a matrix. The
  product is float32.

The result equals that of transformers, bit for bit.
"""

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from perilune.errors import RequestError
from perilune.models.checkpoints.folder import CheckpointFolder
from perilune.models.checkpoints.tensors import StoredTensor, read_tensor_headers
from perilune.models.config.quantization import Quantization, read_quantization

_BLOCK = 32  # numbers that share a scale in MXFP4
_BIAS = 127  # of the exponent in its scale
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the low three bits of E2M1
_SCALES = {"mxfp4": ("U8",), "fp8": ("F32", "BF16", "F16")}


@dataclass(frozen=True, slots=True)
class QuantizedTensor(StoredTensor):
    """A tensor that is stored as `values` and `scales`. `name`, `dtype` and `shape` are those of the result.

    Attributes:
        block: rows and columns that share a scale in FP8; None in MXFP4.
    """

    values: StoredTensor
    scales: StoredTensor
    block: tuple[int, int] | None

    def read(self, opened: Any) -> Tensor:
        """Read both from their files and convert them."""
        values = self.values.read(opened)
        if self.scales.file == self.file:
            scales = self.scales.read(opened)
        else:
            with safe_open(self.scales.file, framework="pt") as file:
                scales = self.scales.read(file)
        return from_mxfp4(values, scales) if self.block is None else from_fp8(values, scales, self.block)


def unquantized_tensors(folder: CheckpointFolder) -> dict[str, StoredTensor]:
    """Return the tensors by name, each quantized one under its name in the unquantized checkpoint.

    Raises:
        RequestError: as `read_tensor_headers` and `read_quantization`; when the scales of a tensor are
            missing or have another shape or dtype.
    """
    quantization = read_quantization(folder.config)
    stored = read_tensor_headers(folder)
    if quantization is None:
        return stored
    tensors = dict(stored)
    mxfp4 = quantization.method == "mxfp4"
    values_suffix, scales_suffix = ("_blocks", "_scales") if mxfp4 else ("", "_scale_inv")
    for values in stored.values():
        if not (values.name.endswith("_blocks") if mxfp4 else values.dtype == "F8_E4M3"):
            continue
        name = values.name.removesuffix(values_suffix)
        scales = stored.get(name + scales_suffix)
        if scales is None:
            missing = f"tensor {name}{scales_suffix}, for {values.name}, is missing"
            raise RequestError(missing, where=str(folder.path), remedy="fetch the folder again")
        del tensors[values.name], tensors[scales.name]
        tensors[name] = (_mxfp4 if mxfp4 else _fp8)(name, values, scales, quantization)
    return tensors


def _mxfp4(
    name: str, values: StoredTensor, scales: StoredTensor, quantization: Quantization
) -> QuantizedTensor:
    if values.dtype != "U8" or len(values.shape) != 4 or values.shape[3] != _BLOCK // 2:
        raise _scales_error(values, f"U8 of shape [experts, outputs, blocks, {_BLOCK // 2}]")
    _check_scales(scales, values.shape[:3], quantization)
    experts, outputs, blocks, _ = values.shape
    return QuantizedTensor(
        name, "BF16", (experts, blocks * _BLOCK, outputs), values.file, values, scales, None
    )


def _fp8(
    name: str, values: StoredTensor, scales: StoredTensor, quantization: Quantization
) -> QuantizedTensor:
    if len(values.shape) != 2:
        raise _scales_error(values, "a matrix")
    rows, columns = values.shape
    block = quantization.block or (rows, columns)
    shape = (-(-rows // block[0]), -(-columns // block[1]))
    if quantization.block or scales.numel != 1:
        _check_scales(scales, shape, quantization)
    return QuantizedTensor(name, "F32", values.shape, values.file, values, scales, block)


def _check_scales(scales: StoredTensor, shape: tuple[int, ...], quantization: Quantization) -> None:
    dtypes = _SCALES[quantization.method]
    if scales.shape != shape or scales.dtype not in dtypes:
        raise _scales_error(scales, f"{' or '.join(dtypes)} of shape {list(shape)}")


def _scales_error(tensor: StoredTensor, wanted: str) -> RequestError:
    what = f"tensor {tensor.name} is {tensor.dtype} of shape {list(tensor.shape)}, not {wanted}"
    return RequestError(what, where=str(tensor.file), remedy="fetch the file again")


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return bfloat16[E, I, O] from uint8[E, O, I / 32, 16] and the biased exponents uint8[E, O, I / 32]."""
    experts, outputs, count, _ = blocks.shape
    numbers = torch.tensor([*_POSITIVE, *(-number for number in _POSITIVE)], dtype=torch.bfloat16)
    # The two numbers of each of the 256 possible bytes, as one element.
    pairs = torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], dim=1).view(torch.int32)[:, 0]
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - _BIAS).bfloat16()
    out = torch.empty(experts, count * _BLOCK, outputs, dtype=torch.bfloat16)
    for expert_blocks, expert_scales, expert_out in zip(blocks, scales, out, strict=True):
        # `index_select` is seven times faster than `pairs[...]`.
        values = pairs.index_select(0, expert_blocks.int().flatten()).view(torch.bfloat16)
        scaled = values.view(outputs, count, _BLOCK) * powers[expert_scales.int()][..., None]
        expert_out.copy_(scaled.flatten(1).t())
    return out


def from_fp8(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Return float32[R, C] from E4M3[R, C] and a scale for each block; the last blocks may be smaller."""
    out = values.float()
    columns = out.shape[1]
    row_scales = scales.float().reshape(-1, -(-columns // block[1]))
    for rows, factors in zip(torch.split(out, block[0]), row_scales, strict=True):
        rows.mul_(factors.repeat_interleave(block[1])[:columns])
    return out
