"""The C kernels for products and operations on rows, called with float32 torch tensors on the CPU.

Every function requires `is_available()`. Callers guarantee dtypes and matching shapes; the functions do not
check them again.
"""

import mmap
from collections.abc import Iterator, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from perilune.errors import WorkFailedError
from perilune.models.native.build import native
from perilune.models.scratch import scratch_buffer

PANEL = 32  # outputs of a panel, the unit in which weights are packed
LANES = 16  # floats over which sums run in parallel; rows must be multiples of this
_PACKED_AT_ONCE = 1 << 20  # elements of a weight that are converted to float32 at a time

WeightKind = Literal["float32", "bfloat16", "int8"]
Activation = Literal["silu", "gelu_pytorch_tanh", "clamped"]
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_pytorch_tanh": 1, "clamped": 2}
KINDS: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_DTYPES: dict[WeightKind, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}


class Weight(Structure):
    """struct weight."""

    _fields_ = (
        ("panels", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("kind", c_int64),
    )


class _Draws(Structure):
    """struct draws."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "scales", "rows", "uniform")),
        ("count", c_int64),
        ("size", c_int64),
        ("tokens", c_void_p),
        ("logprobs", c_void_p),
        ("failed", c_int),
    )


def is_available() -> bool:
    """Return whether the kernels can be used. The first call may compile them, which takes seconds."""
    return native().library is not None


_P, _I, _F = c_void_p, c_int64, c_float
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "pack": (_P, _I, _I, _I, _I, _I, _P, _P, _I),
    "has_tiles": (),
    "has_bfloat16": (),
    "linear": (_P, _I, _I, POINTER(Weight), _P, _P, _I),
    "linear_across": (_P, _I, _I, POINTER(Weight), _P, _P, _I),
    "rms_norm": (_P, _I, _I, _P, _I, _F, _P, _P, _I),
    "rms_norm_backward": (_P, _I, _I, _P, _I, _P, _P, _P, _P, _I),
    "rotate": (_P, _I, _I, _I, _P, _P, _I, _F, _P, _I),
    "gated": (_P, _P, _I, _I, _I, _P, _I),
    "route": (_P, _I, _I, _I, _I, _P, _P, _P, _I),
    "swiglu_backward": (_P, _P, _P, _I, _I, _P, _P, _I),
    "token_logprobs": (_P, _I, _I, _P, _F, _P, _P, _P, _I),
    "token_logprobs_backward": (_P, _I, _I, _P, _F, _P, _P, _P, _I),
    "draw": (POINTER(_Draws), _I),
}


@cache
def kernel(name: str, *types: Any) -> Any:
    """Return the function `perilune_<name>` with argument types `types`, by default those in `_ARGUMENTS`."""
    library = native().library
    assert library is not None
    function = getattr(library, f"perilune_{name}")
    function.argtypes = types or _ARGUMENTS[name]
    return function


def _rows_as_float32(weight: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield chunks of float[O, I] as float32: the number of the first row, a multiple of PANEL, and rows."""
    if weight.dtype == torch.float32 and weight.stride(1) == 1:
        yield 0, weight
        return
    inputs = weight.shape[1]
    at_once = max(1, _PACKED_AT_ONCE // (inputs * PANEL)) * PANEL
    buffer = _allocate(min(at_once, len(weight)) * inputs, torch.float32).view(-1, inputs)
    for first in range(0, len(weight), at_once):
        rows = weight[first : first + at_once]
        yield first, buffer[: len(rows)].copy_(rows)


def _allocate(count: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor. Large tensors are outside the heap, so that they do not fragment it."""
    size = count * dtype.itemsize
    if size < mmap.PAGESIZE * 16:
        return torch.empty(count, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A float[O, I] weight in the layout of the kernels, and its bias; made by `pack_weight`.

    Attributes:
        tensors: the memory that `struct` points to.
    """

    struct: Weight
    tensors: tuple[Tensor, ...]

    @property
    def outputs(self) -> int:
        return int(self.struct.outputs)


def pack_weight(
    weight: Tensor, bias: Tensor | None = None, kind: WeightKind = "float32", *, temporary: bool = False
) -> PackedWeight:
    """Pack float[O, I] as `kind`. bfloat16 requires an even I.

    Args:
        temporary: use this thread's scratch buffer, which the next temporary weight overwrites.
    """
    size = -(-len(weight) // PANEL) * PANEL * weight.shape[1]
    buffer = scratch_buffer("panels", [size], _DTYPES[kind], weight.device) if temporary else None
    return pack_parts([(weight, bias)], kind, buffer)


def pack_parts(
    parts: Sequence[tuple[Tensor, Tensor | None]], kind: WeightKind, buffer: Tensor | None = None
) -> PackedWeight:
    """Pack weights float[O, I] of one input and their biases, stacked.

    Each weight begins a new panel. Zeros fill the rest of the last panel of each weight.

    Args:
        buffer: memory to overwrite: `tensors[0]` of a packed weight of equal size.
    """
    inputs, dtype = parts[0][0].shape[1], _DTYPES[kind]
    starts = [0]
    for weight, _ in parts:
        starts.append(starts[-1] - -len(weight) // PANEL * PANEL)
    count = starts[-1]
    panels = _allocate(count * inputs, dtype) if buffer is None else buffer
    scale = torch.empty(count if kind == "int8" else 0)
    padded = torch.zeros(0 if all(bias is None for _, bias in parts) else count)
    for start, (weight, bias) in zip(starts, parts, strict=False):
        if bias is not None:
            padded[start : start + len(bias)] = bias.detach()
        for first, rows in _rows_as_float32(weight.detach()):
            panel, factors = panels[(start + first) * inputs :], scale[start + first :]
            _run("pack", rows, len(rows), inputs, rows.stride(0), KINDS[dtype], False, panel, factors)
    struct = Weight(
        panels.data_ptr(),
        scale.data_ptr() if kind == "int8" else None,
        padded.data_ptr() if len(padded) else None,
        starts[-2] + len(parts[-1][0]),
        inputs,
        KINDS[dtype],
    )
    return PackedWeight(struct, (panels, scale, padded))


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """Compute the product float32[N, O] of float32[N, I] and the weight, plus its bias."""
    if x.stride(-1) != 1 or x.stride(0) < x.shape[1]:  # for example one row that is repeated
        x = x.clone(memory_format=torch.contiguous_format)
    out = torch.empty(x.shape[0], weight.outputs)
    rounded = None
    if weight.struct.kind == KINDS[torch.bfloat16]:
        rounded = torch.empty(x.shape[0] * x.stride(0), dtype=torch.bfloat16)
    _run("linear", x, x.shape[0], x.stride(0), byref(weight.struct), out, rounded)
    return out


@cache
def has_tiles() -> bool:
    """Return whether the processor multiplies bfloat16 tiles (Intel AMX), 8 times as fast as float32."""
    return is_available() and bool(kernel("has_tiles")())


@cache
def has_bfloat16() -> bool:
    """Return whether the processor has instructions for bfloat16 products: AVX512-BF16 or AMX."""
    return is_available() and bool(kernel("has_bfloat16")())


def gradients_of_linear(
    grad: Tensor, x: Tensor | None, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Compute grad @ weight and grad.T @ x, with factors rounded to bfloat16 and sums in float32.

    Args:
        grad: float32[N, O], N and O even.
        x: float32[N, I], or None if the gradient of the weight is not needed.
        weight: float32[O, I], or None if the gradient of `x` is not needed.
    """
    grad = grad.contiguous()
    grad_x = None if weight is None else linear(grad, _pack_across(weight))
    if x is None:
        return grad_x, None
    rows, outputs = grad.shape
    grad_weight = torch.empty(outputs, x.shape[1])
    rounded = torch.empty(outputs * rows, dtype=torch.bfloat16)
    _run("linear_across", grad, outputs, outputs, byref(_pack_across(x).struct), grad_weight, rounded)
    return grad_x, grad_weight


def _pack_across(weight: Tensor) -> PackedWeight:
    """Pack the transpose of float32[I, O] as bfloat16 in this thread's scratch buffer."""
    weight = weight.detach().contiguous()
    inputs, outputs = weight.shape
    size = -(-outputs // PANEL) * PANEL * inputs
    panels = scratch_buffer("panels", [size], torch.bfloat16, weight.device)
    _run("pack", weight, outputs, inputs, outputs, KINDS[torch.bfloat16], True, panels, None)
    struct = Weight(panels.data_ptr(), None, None, outputs, inputs, KINDS[torch.bfloat16])
    return PackedWeight(struct, (panels, weight))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute x / rms(x) * weight over the last axis, and 1 / rms(x) of each row, float32[..., 1].

    `weight` is float32[D], or float32[H, D] for float32[N, H, D].
    """
    x, weight = x.contiguous(), weight.contiguous()
    out, factor = torch.empty_like(x), torch.empty(*x.shape[:-1], 1)
    size = x.shape[-1]
    _run("rms_norm", x, x.numel() // size, size, weight, weight.numel() // size, eps, out, factor)
    return out, factor


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight from that of the output; `factor` is a result of `rms_norm`."""
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    grad_x, grad_weight = torch.empty_like(x), torch.zeros(threads(), *weight.shape)
    size = x.shape[-1]
    rows, weights = x.numel() // size, weight.numel() // size
    _run("rms_norm_backward", x, rows, size, weight, weights, factor, grad, grad_x, grad_weight)
    return grad_x, grad_weight[0]


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, direction: int = 1) -> Tensor:
    """Rotate float32[N, H, D] by float32[N, D / 2] cosines and sines (rows may be strided), or back (-1)."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _run("rotate", x, *x.shape, cosine, sine, cosine.stride(0), direction, out)
    return out


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Compute activation(gate) * up of float32[N, F]."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _run("gated", gate, up, *gate.shape, ACTIVATIONS[activation], out)
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(gate)
    _run("swiglu_backward", gate, up, grad, *gate.shape, grad_gate, grad_up)
    return grad_gate, grad_up


def route(
    logits: Tensor, per_token: int, normalized: bool, forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return weights float32[N, K] and indices int64[N, K] of the experts of rows of logits float32[N, E].

    `forced` experts int64[N, K] replace the choice, except in rows of -1.

    Raises:
        ValueError: when a given expert does not exist.
    """
    if forced is not None:
        forced = forced.contiguous()
        if forced.shape != (len(logits), per_token) or bool((forced >= logits.shape[1]).any()):
            raise ValueError(f"routes {tuple(forced.shape)} do not fit {logits.shape[1]} experts")
    scratch = logits.clone(memory_format=torch.contiguous_format)
    weights = torch.empty(len(logits), per_token)
    chosen = torch.empty(len(logits), per_token, dtype=torch.int64)
    _run("route", scratch, *logits.shape, per_token, normalized, forced, weights, chosen)
    return weights, chosen


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log softmax(logits / temperature) of int64[N] tokens.

    Returns:
        log-probs float32[N], normalizers float32[N, 2] for the gradient, and entropies float32[N].
    """
    logits, tokens = logits.contiguous(), tokens.contiguous()
    out, entropy = torch.empty(len(logits)), torch.empty(len(logits))
    normalizers = torch.empty(len(logits), 2)
    _run("token_logprobs", logits, *logits.shape, tokens, 1 / temperature, out, normalizers, entropy)
    return out, normalizers, entropy


def token_logprobs_backward(
    grad: Tensor, logits: Tensor, tokens: Tensor, temperature: float, normalizers: Tensor
) -> Tensor:
    """Return the gradient float32[N, V] of the logits from that of the log-probs."""
    grad, logits, tokens = grad.contiguous(), logits.contiguous(), tokens.contiguous()
    out = torch.empty_like(logits)
    scale = 1 / temperature
    _run("token_logprobs_backward", logits, *logits.shape, tokens, scale, normalizers, grad, out)
    return out


def draw(
    logits: Tensor, scales: Tensor, uniform: Tensor, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw D tokens by inverting cumulative distributions.

    Args:
        logits: float32[R, V].
        scales: float32[D], 1 / temperature of each, or 0 for the most likely token.
        uniform: float64[D] in [0, 1).
        rows: int64[D], the row of logits of each draw; None when draw i uses row i.

    Returns:
        tokens int64[D], and their log-probs float32[D] under the distribution drawn from (unscaled where the
        scale is 0).
    """
    logits, scales = logits.contiguous(), scales.contiguous()
    count = len(scales)
    tokens, logprobs = torch.empty(count, dtype=torch.int64), torch.empty(count)
    inputs = pointer_fields(logits=logits, scales=scales, rows=rows, uniform=uniform)
    outputs = pointer_fields(tokens=tokens, logprobs=logprobs)
    draws = _Draws(**inputs, **outputs, count=count, size=logits.shape[1])
    check(kernel("draw")(byref(draws), threads()), "drawing tokens")
    return tokens, logprobs


def pointer_fields(**tensors: Tensor | None) -> dict[str, int | None]:
    """Return the fields of a struct that point to these tensors, which must outlive the call."""
    return {name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}


def strided_fields(**tensors: Tensor) -> dict[str, int | None]:
    """Return `pointer_fields`, and for each a field "..._stride" with the elements between two rows."""
    return {**pointer_fields(**tensors), **{f"{name}_stride": t.stride(0) for name, t in tensors.items()}}


def threads() -> int:
    """Return the number of threads that kernels use, as many as torch."""
    return torch.get_num_threads()


def _run(name: str, *arguments: Any) -> None:
    """Call a kernel on all threads. Tensors are passed as pointers."""
    pointers = (argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments)
    kernel(name)(*pointers, threads())


def check(failed: int, where: str) -> None:
    """Raise WorkFailedError if a kernel reports that memory ran out."""
    if failed:
        raise WorkFailedError("out of memory", where=where, remedy="use shorter sequences or smaller batches")
