"""Norms, rotary embeddings and gated activations on a GPU in Triton, forward and backward.

torch's own kernels read and write memory several times for each of these functions, which takes longer than
the matrix products between them. These kernels read each input and write each result once. They compute in
float32, whatever the dtype of tensors. **The bits of a row depend on that row alone**: one program computes a
whole row, and its layout depends only on the size of a row. The gradient of a norm's weight is summed in
fixed chunks of rows, so it is the same in every run.

Importing this module requires Triton. If TRITON_INTERPRET=1 is set before, the kernels run slowly on a CPU,
which the tests use.

N tokens, H heads, D elements of a row, R rows of all heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.models.native.ops import ACTIVATIONS, Activation

_TILE = 2048  # elements that a program computes
_PROGRAMS = 512  # programs of the backward pass of a norm; each sums the weight's gradient over its rows
_VARYING = ["count", "chunk"]  # arguments that change from step to step: compile once for all values


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last axis.

    Args:
        x: float[N, D] or float[N, H, D]; the last axis is contiguous.
        weight: float[D], or float[H, D].

    Returns:
        The result in the dtype of `x`, contiguous, and float32[R], the factor of each row before `weight`.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    scale = x.new_empty(out.numel() // x.shape[-1], dtype=torch.float32)
    rows, per_head = _rows(x), weight.dim() > 1
    _rms_norm[(triton.cdiv(len(scale), rows["ROWS"]),)](
        x, weight.contiguous(), out, scale, len(scale), *_strides(x), eps, PER_HEAD=per_head, **rows
    )
    return out, scale


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x`, in its dtype, and of `weight`, in float32."""
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, groups = _rows(x), len(weight) if weight.dim() > 1 else 1
    count = len(scale) // groups
    chunk = triton.cdiv(count, max(1, _PROGRAMS // groups))
    chunk = triton.cdiv(chunk, rows["ROWS"]) * rows["ROWS"]
    chunks = triton.cdiv(count, chunk)
    partial = x.new_empty(chunks, *weight.shape, dtype=torch.float32)
    grad, weight = grad.contiguous(), weight.contiguous()
    _rms_norm_backward[(groups, chunks)](
        grad, x, weight, scale, grad_x, partial, count, chunk, *_strides(x), GROUPS=groups, **rows
    )
    return grad_x, partial.sum(0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Rotate the pairs of float[N, H, D] by their angles, or back if `direction` is -1.

    Args:
        x: the last axis is contiguous.
        cos, sin: float[N, D / 2] of the angle of each pair, equally strided; the last axis is contiguous.

    Returns:
        As `x`, contiguous.
    """
    tokens, heads, size = x.shape
    half = size // 2
    width = triton.next_power_of_2(half)
    heads_per_program = min(triton.next_power_of_2(heads), max(1, _TILE // width))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    layout = {"HEADS": heads, "SIZE": size, "HALF": half, "WIDTH": width, "AT_ONCE": heads_per_program}
    _rotate[(tokens, triton.cdiv(heads, heads_per_program))](
        x, cos, sin, out, *_strides(x), cos.stride(0), float(direction), **layout, num_warps=4
    )
    return out


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Compute activation(gate) * up of float[N, D]; the last axes are contiguous."""
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    grid, layout = _gated_layout(gate, activation)
    _gated[grid](gate, up, out, gate.stride(0), up.stride(0), **layout)
    return out


def gated_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gate` and `up`, contiguous."""
    grad_gate, grad_up = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (gate, up))
    grid, layout = _gated_layout(gate, activation)
    _gated_backward[grid](
        grad.contiguous(), gate, up, grad_gate, grad_up, gate.stride(0), up.stride(0), **layout
    )
    return grad_gate, grad_up


def _gated_layout(x: Tensor, activation: Activation) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid of programs that compute parts of rows, and their constants."""
    (rows, size), tile = x.shape, _TILE // 2
    return (rows, triton.cdiv(size, tile)), {"SIZE": size, "KIND": ACTIVATIONS[activation], "TILE": tile}


def _strides(x: Tensor) -> tuple[int, int]:
    """Return the strides of tokens and of heads, in elements."""
    return x.stride(0), x.stride(1) if x.dim() > 2 else 0


def _rows(x: Tensor) -> dict[str, int]:
    """Return the layout of a program that computes whole rows."""
    width = triton.next_power_of_2(x.shape[-1])
    heads, rows = x.shape[1] if x.dim() > 2 else 1, max(1, _TILE // width)
    layout = {"HEADS": heads, "SIZE": x.shape[-1], "WIDTH": width, "ROWS": rows}
    return layout | {"num_warps": min(16, max(4, width * rows // 1024))}


@triton.jit(do_not_specialize=_VARYING)
def _rms_norm(  # noqa: PLR0917
    x_ptr,
    weight_ptr,
    out_ptr,
    scale_ptr,
    count,
    x_stride,
    head_stride,
    eps,
    PER_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute whole rows of all heads, in order."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    element = tl.arange(0, WIDTH)
    head = row % HEADS
    mask = (row < count)[:, None] & (element < SIZE)[None, :]
    x_at = (row // HEADS * x_stride + head * head_stride)[:, None] + element[None, :]
    x = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(tl.float32)
    weight_row = head if PER_HEAD else head * 0
    weight = tl.load(weight_ptr + weight_row[:, None] * SIZE + element[None, :], mask=mask, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)
    out = x * scale[:, None] * weight.to(tl.float32)
    tl.store(out_ptr + row[:, None] * SIZE + element[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + row, scale, mask=row < count)


@triton.jit(do_not_specialize=_VARYING)
def _rms_norm_backward(  # noqa: PLR0917
    grad_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    grad_x_ptr,
    partial_ptr,
    count,
    chunk,
    x_stride,
    head_stride,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """With n = scale x and g = weight grad: dx = scale (g - n mean(n g)), dw = sum of n grad.

    A program computes `chunk` rows of the rows that share a weight.
    """
    group, part = tl.program_id(0), tl.program_id(1).to(tl.int64)
    element = tl.arange(0, WIDTH)
    inside = element < SIZE
    weight = tl.load(weight_ptr + group * SIZE + element, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    stop = tl.minimum((part + 1) * chunk, count)
    for first in range(part * chunk, stop, ROWS):
        index = first + tl.arange(0, ROWS)
        row = index * GROUPS + group
        mask = (index < stop)[:, None] & inside[None, :]
        x_at = (row // HEADS * x_stride + row % HEADS * head_stride)[:, None] + element[None, :]
        offset = row[:, None] * SIZE + element[None, :]
        x = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row, mask=index < stop, other=0.0)[:, None]
        normal, weighted = x * scale, grad * weight[None, :]
        mean = tl.sum(normal * weighted, 1)[:, None] / SIZE
        grad_x = scale * (weighted - normal * mean)
        tl.store(grad_x_ptr + offset, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        total += tl.sum(normal * grad, 0)
    tl.store(partial_ptr + (part * GROUPS + group) * SIZE + element, total, mask=inside)


@triton.jit(do_not_specialize=_VARYING)
def _rotate(  # noqa: PLR0917
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    x_stride,
    head_stride,
    angle_stride,
    direction,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """(a, b) becomes (a cos - b sin, b cos + a sin) for some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE), tl.arange(0, WIDTH)
    inside = pair < HALF
    cos = tl.load(cos_ptr + token * angle_stride + pair, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * angle_stride + pair, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = sin * direction
    mask = (head < HEADS)[:, None] & inside[None, :]
    x_at = token * x_stride + head[:, None] * head_stride + pair[None, :]
    a = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + x_at + HALF, mask=mask, other=0.0).to(tl.float32)
    offset = (token * HEADS + head[:, None]) * SIZE + pair[None, :]
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + offset, (a * cos - b * sin).to(kind), mask=mask)
    tl.store(out_ptr + offset + HALF, (b * cos + a * sin).to(kind), mask=mask)


@triton.jit
def _bounded(gate, up):
    """Clamp the inputs as gpt-oss does: gate <= 7, -7 <= up <= 7, and add 1 to up. NaN stays NaN."""
    return tl.where(gate > 7.0, 7.0, gate), tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1


@triton.jit
def _activation(gate, KIND: tl.constexpr):
    if KIND == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        tanh = 2 * tl.sigmoid(2 * inner) - 1
        slope = 0.7978845608028654 * (1 + 0.134145 * gate * gate)
        return 0.5 * gate * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * gate * (1 - tanh * tanh) * slope
    factor = 1.702 if KIND == 2 else 1.0
    share = tl.sigmoid(factor * gate)
    return gate * share, share * (1 + factor * gate * (1 - share))


@triton.jit(do_not_specialize=_VARYING)
def _gated(  # noqa: PLR0917
    gate_ptr,
    up_ptr,
    out_ptr,
    gate_stride,
    up_stride,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute a part of one row."""
    row, element = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = element < SIZE
    gate = tl.load(gate_ptr + row * gate_stride + element, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + element, mask=mask, other=0.0).to(tl.float32)
    if KIND == 2:
        gate, up = _bounded(gate, up)
    out, _ = _activation(gate, KIND)
    tl.store(out_ptr + row * SIZE + element, (out * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_VARYING)
def _gated_backward(  # noqa: PLR0917
    grad_ptr,
    gate_ptr,
    up_ptr,
    of_gate_ptr,
    of_up_ptr,
    gate_stride,
    up_stride,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
):
    """dg = dy u f'(g) and du = dy f(g), and 0 beyond the bounds of gpt-oss."""
    row, element = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = element < SIZE
    grad = tl.load(grad_ptr + row * SIZE + element, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + element, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + element, mask=mask, other=0.0).to(tl.float32)
    grad_gate, grad_up = grad, grad
    if KIND == 2:
        grad_gate = tl.where(gate > 7.0, 0.0, grad_gate)
        grad_up = tl.where(tl.abs(up) > 7.0, 0.0, grad_up)
        gate, up = _bounded(gate, up)
    out, slope = _activation(gate, KIND)
    kind = of_gate_ptr.dtype.element_ty
    tl.store(of_gate_ptr + row * SIZE + element, (grad_gate * up * slope).to(kind), mask=mask)
    tl.store(of_up_ptr + row * SIZE + element, (grad_up * out).to(kind), mask=mask)
