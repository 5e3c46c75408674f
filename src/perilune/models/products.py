"""Products with matrices, forward and backward. Each row has the same bits in every batch.

Where `is_exact`, the C kernels or oneDNN compute the products. oneDNN sums in the same order for two or more
rows and any number of threads, so a single row is computed as two equal rows. (MKL, torch's default, sums in
another order below ten rows, and is half as fast on some processors.)
"""

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.models.kernels import HAS_ONEDNN, is_exact, is_native
from perilune.models.narrow import NarrowKind, NarrowWeight, Precision, bfloat16_matmul, round_weight
from perilune.models.native import ops
from perilune.models.native.ops import PackedWeight


def linear(
    x: Tensor,
    weight: Tensor | PackedWeight | NarrowWeight,
    bias: Tensor | None = None,
    precision: Precision = "float32",
) -> Tensor:
    """Compute float[N, O] = float[N, I] @ float[O, I].T + float[O].

    Args:
        weight: a tensor, or the result of `pack_weight`.
        precision: precision of the product. A packed weight ignores it.
    """
    if isinstance(weight, PackedWeight):
        return ops.linear(x, weight)
    if isinstance(weight, NarrowWeight):
        return add_bias(weight.matmul(x), bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        if not is_exact(x) and precision == "float32":
            return F.linear(x, weight, bias)
        out: Tensor = _Linear.apply(x, weight, precision)  # type: ignore[no-untyped-call]
        return add_bias(out, bias)
    out = matmul(x, weight, precision)
    return out if bias is None else out.add_(bias)


def add_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    """Return `out` plus the bias in the dtype of `out`."""
    return out if bias is None else out + bias.to(out.dtype)


def pack_weight(
    weight: Tensor, bias: Tensor | None = None, kind: NarrowKind | None = None
) -> tuple[Tensor | PackedWeight | NarrowWeight, Tensor | None]:
    """Return weight and bias in the fastest layout for many calls of `linear` without gradients.

    Args:
        kind: storage of the weight; by default its dtype.
    """
    if is_native(weight) and (kind != "bfloat16" or weight.shape[1] % 2 == 0):
        return ops.pack_weight(weight, bias, kind or "float32"), None
    bias = None if bias is None else bias.detach().clone()
    if kind is not None:
        return round_weight(weight, kind), bias
    if not is_exact(weight):
        return weight.detach().clone(), bias
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_ROWS), bias


_TYPICAL_ROWS = 256


def matmul(x: Tensor, weight: Tensor, precision: Precision = "float32") -> Tensor:
    """Compute x @ weight.T of float[N, I] and float[O, I]. Where `is_exact`, sums have a fixed order."""
    if precision == "bfloat16":
        if is_native(x) and weight.shape[1] % 2 == 0:
            return ops.linear(x, ops.pack_weight(weight, None, "bfloat16", temporary=True))
        return round_weight(weight, "bfloat16").matmul(x)
    if is_native(x):
        return ops.linear(x, ops.pack_weight(weight, temporary=True))
    # oneDNN sums in another order for another layout.
    return _onednn_matmul(x, weight.contiguous()) if is_exact(x) else F.linear(x, weight)


def _onednn_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x @ weight.T with oneDNN."""
    if not HAS_ONEDNN:
        return x @ weight.t()
    if x.shape[0] == 1:
        return _onednn_matmul(x.expand(2, -1), weight)[:1]
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    """y = x W^T;  dx = dy W;  dW = dy^T x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, precision: Precision) -> Tensor:
        ctx.precision = precision
        if _rounds_on_gpu(x, precision):
            ctx.dtype, x = x.dtype, x.to(torch.bfloat16)
            ctx.save_for_backward(x, weight)
            return bfloat16_matmul(x, weight.to(torch.bfloat16), ctx.dtype)
        ctx.save_for_backward(x, weight)
        return matmul(x, weight, precision)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        if _rounds_on_gpu(grad, ctx.precision):
            grad = grad.to(torch.bfloat16)
            grad_x = bfloat16_matmul(grad, weight.to(torch.bfloat16).t(), ctx.dtype) if needs_x else None
            return grad_x, bfloat16_matmul(grad.t(), x.t(), weight.dtype) if needs_weight else None, None
        x, grad = x.contiguous(), grad.contiguous()  # oneDNN is 300 times slower for strided rows
        precision: Precision = ctx.precision
        if precision == "bfloat16" and _fits_tiles(grad, weight):
            grads = ops.gradients_of_linear(grad, x if needs_weight else None, weight if needs_x else None)
            return *grads, None
        grad_x = gradient_matmul(grad, weight.t(), precision) if needs_x else None
        if not needs_weight:
            return grad_x, None, None
        # oneDNN copies its first operand, so put the smaller matrix first.
        if weight.shape[0] < weight.shape[1] or is_mkl_faster(grad.t(), x.t()):
            return grad_x, gradient_matmul(grad.t(), x.t(), precision), None
        return grad_x, gradient_matmul(x.t(), grad.t(), precision).t(), None


def _rounds_on_gpu(x: Tensor, precision: Precision) -> bool:
    """Return whether a GPU computes a bfloat16 product, whose factors are rounded once, before it."""
    return precision == "bfloat16" and x.device.type == "cuda"


def _fits_tiles(grad: Tensor, weight: Tensor) -> bool:
    """Return whether tiles can compute the gradients: they sum over rows and outputs in multiples of 32."""
    return is_native(grad) and not (len(grad) % 32 or len(weight) % 32) and ops.has_tiles()


def gradient_matmul(x: Tensor, weight: Tensor, precision: Precision) -> Tensor:
    """Compute x @ weight.T for a gradient, in any order of summation; oneDNN rounds bfloat16 results."""
    if precision == "bfloat16":
        narrow, narrow_weight = x.to(torch.bfloat16), weight.to(torch.bfloat16)
        if _rounds_on_gpu(x, precision):
            return bfloat16_matmul(narrow, narrow_weight, x.dtype)
        if _has_bfloat16_matmul():
            return (narrow @ narrow_weight.t()).to(x.dtype)
        x, weight = narrow.to(x.dtype), narrow_weight.to(weight.dtype)
    return x @ weight.t() if not is_exact(x) or is_mkl_faster(x, weight) else _onednn_matmul(x, weight)


@functools.cache
def _has_bfloat16_matmul() -> bool:
    """Return whether oneDNN multiplies bfloat16 matrices on this processor.

    Otherwise torch's own product takes about fifty times as long as one in float32 (on AVX2).
    """
    return HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-any-return]


_MIN_MKL_ELEMENTS = 1 << 17


def is_mkl_faster(x: Tensor, weight: Tensor) -> bool:
    """Return whether MKL computes x @ weight.T faster than oneDNN: on Intel, if all matrices are large.

    On a Xeon with AVX-512, gradients of matrices of 576 x 1536 take 0.6 to 0.9 of oneDNN's time; on AMD they
    take twice as long.
    """
    smallest = min(x.numel(), weight.numel(), x.shape[0] * weight.shape[0])
    return smallest >= _MIN_MKL_ELEMENTS and x.device.type == "cpu" and _has_intel_mkl()


@functools.cache
def _has_intel_mkl() -> bool:
    try:
        processor = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "GenuineIntel" in processor and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
