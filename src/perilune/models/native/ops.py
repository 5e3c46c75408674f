"""The C kernels over torch tensors: float32, on the CPU, forward only.

Every function needs `available()`; shapes are as the decoder's. Arguments that the caller vouches for (kinds,
shapes that belong together) are not checked again here.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from perilune.errors import WorkFailedError
from perilune.models.native.build import native

PANEL = 32
LANES = 16

WeightKind = Literal["float32", "bfloat16", "int8"]
Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}
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


class Cache(Structure):
    """struct cache: see `PagedCache`."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        ("blocks", c_int64),
        ("kind", c_int64),
    )


class Step(Structure):
    """struct step: the tokens of one step."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "tables_stride", "logit_count")),
        *((name, c_void_p) for name in ("tokens", "positions", "logit_rows", "sequence", "tables", "logits")),
    )


class _Paged(Structure):
    """struct attention_call."""

    _fields_ = (
        ("cache", POINTER(Cache)),
        ("step", POINTER(Step)),
        ("q", c_void_p),
        ("out", c_void_p),
        *(
            (name, c_int64)
            for name in ("layer", "heads", "kv_heads", "size", "window", "q_stride", "out_stride")
        ),
        ("scale", c_float),
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("failed", c_int),
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


class _Packed(Structure):
    """struct packed."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, c_int64) for name in ("heads", "kv_heads", "size", "window", "sequences")),
        *((name, c_void_p) for name in ("starts", "lengths", "prefix_starts", "prefixes")),
        ("scale", c_float),
        ("out", c_void_p),
        ("log_total", c_void_p),
        *((name, c_void_p) for name in ("grad_out", "grad_q", "grad_k", "grad_v", "family")),
        ("families", c_int64),
        ("longest", c_int64),
        ("failed", c_int),
        ("next", ctypes.c_long),
    )


def available() -> bool:
    """Whether the kernels are there; the first call may compile them, which takes some seconds."""
    return native().library is not None


_P, _I, _F = c_void_p, c_int64, c_float
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "pack": (_P, _I, _I, _I, _I, _P, _P),
    "linear": (_P, _I, _I, POINTER(Weight), _P, _P, _I),
    "rms_norm": (_P, _I, _I, _P, _I, _F, _P, _P, _I),
    "rms_norm_backward": (_P, _I, _I, _P, _I, _P, _P, _P, _P, _I),
    "rotate": (_P, _I, _I, _I, _P, _P, _I, _F, _P, _I),
    "gated": (_P, _P, _I, _I, _I, _P, _I),
    "swiglu_backward": (_P, _P, _P, _I, _I, _P, _P, _I),
    "token_logprobs": (_P, _I, _I, _P, _F, _P, _P, _P, _I),
    "token_logprobs_backward": (_P, _I, _I, _P, _F, _P, _P, _P, _I),
    "draw": (POINTER(_Draws), _I),
    "attend_paged": (POINTER(_Paged), _I),
    "step": (_P, POINTER(Cache), POINTER(Step), _I),
    "attend_packed": (POINTER(_Packed), _I),
    "attend_packed_backward": (POINTER(_Packed), _I),
}


@cache
def kernel(name: str) -> Any:
    """The function `perilune_<name>` of the library, knowing the types of its arguments."""
    library = native().library
    assert library is not None
    function = getattr(library, f"perilune_{name}")
    function.argtypes = _ARGUMENTS[name]
    return function


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """float[O, I] in the order the kernels read it, with its bias; made by `pack_weight`.

    Attributes:
        struct: what the kernels take.
        tensors: the memory it points to.
    """

    struct: Weight
    tensors: tuple[Tensor, ...]

    @property
    def outputs(self) -> int:
        return int(self.struct.outputs)


def pack_weight(weight: Tensor, bias: Tensor | None = None, kind: WeightKind = "float32") -> PackedWeight:
    """Lay out float[O, I]; `kind` is how it is kept. bfloat16 needs an even I."""
    weight = weight.detach().float()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    outputs, inputs = weight.shape
    dtype = _DTYPES[kind]
    count = -(-outputs // PANEL) * PANEL
    panels = torch.empty(count * inputs, dtype=dtype)
    scale = torch.empty(count if kind == "int8" else 0)
    kernel("pack")(
        weight.data_ptr(),
        outputs,
        inputs,
        weight.stride(0),
        KINDS[dtype],
        panels.data_ptr(),
        scale.data_ptr(),
    )
    padded = torch.zeros(0)
    if bias is not None:
        padded = torch.zeros(count)
        padded[:outputs] = bias.detach()
    struct = Weight(
        panels.data_ptr(),
        scale.data_ptr() if kind == "int8" else None,
        padded.data_ptr() if bias is not None else None,
        outputs,
        inputs,
        KINDS[dtype],
    )
    return PackedWeight(struct, (panels, scale, padded))


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """float32[N, O] = float32[N, I] times the weight, plus its bias."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape[0], weight.outputs)
    rounded = None
    if weight.struct.kind == KINDS[torch.bfloat16]:
        rounded = torch.empty(x.shape[0] * x.stride(0), dtype=torch.bfloat16)
    kernel("linear")(
        x.data_ptr(),
        x.shape[0],
        x.stride(0),
        byref(weight.struct),
        out.data_ptr(),
        None if rounded is None else rounded.data_ptr(),
        threads(),
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) * weight over the last axis, and 1 / rms(x) of each row, float32[..., 1].

    `weight` is float32[D], or float32[H, D] for float32[N, H, D].
    """
    x, weight = x.contiguous(), weight.contiguous()
    out, factor = torch.empty_like(x), torch.empty(*x.shape[:-1], 1)
    size = x.shape[-1]
    kernel("rms_norm")(
        x.data_ptr(), x.numel() // size, size, weight.data_ptr(), weight.numel() // size, eps, out.data_ptr(),
        factor.data_ptr(), threads(),
    )  # fmt: skip
    return out, factor


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight from that of the norm; `factor` is what `rms_norm` gave."""
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    grad_x, grad_weight = torch.empty_like(x), torch.zeros(threads(), *weight.shape)
    size = x.shape[-1]
    kernel("rms_norm_backward")(
        x.data_ptr(), x.numel() // size, size, weight.data_ptr(), weight.numel() // size, factor.data_ptr(),
        grad.data_ptr(), grad_x.data_ptr(), grad_weight.data_ptr(), threads(),
    )  # fmt: skip
    return grad_x, grad_weight[0]


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, direction: int = 1) -> Tensor:
    """float32[N, H, D] turned by float32[N, D / 2] cosines and sines (rows may be strided); -1 turns back."""
    x = x.contiguous()
    out = torch.empty_like(x)
    kernel("rotate")(
        x.data_ptr(), *x.shape, cosine.data_ptr(), sine.data_ptr(), cosine.stride(0), direction,
        out.data_ptr(), threads(),
    )  # fmt: skip
    return out


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up of float32[N, F]."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    number = ACTIVATIONS[activation]
    kernel("gated")(gate.data_ptr(), up.data_ptr(), *gate.shape, number, out.data_ptr(), threads())
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(gate)
    kernel("swiglu_backward")(
        gate.data_ptr(), up.data_ptr(), grad.data_ptr(), *gate.shape, grad_gate.data_ptr(),
        grad_up.data_ptr(), threads(),
    )  # fmt: skip
    return grad_gate, grad_up


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """log softmax(logits / temperature) at int64[N] tokens, logs of denominators, entropies: float32[N]."""
    logits, tokens = logits.contiguous(), tokens.contiguous()
    out, total, entropy = (torch.empty(len(logits)) for _ in range(3))
    kernel("token_logprobs")(
        logits.data_ptr(), *logits.shape, tokens.data_ptr(), 1 / temperature, out.data_ptr(),
        total.data_ptr(), entropy.data_ptr(), threads(),
    )  # fmt: skip
    return out, total, entropy


def token_logprobs_backward(
    grad: Tensor, logits: Tensor, tokens: Tensor, temperature: float, total: Tensor
) -> Tensor:
    """Gradient of the logits, float32[N, V], from that of the log-probs."""
    grad, logits, tokens = grad.contiguous(), logits.contiguous(), tokens.contiguous()
    out = torch.empty_like(logits)
    kernel("token_logprobs_backward")(
        logits.data_ptr(), *logits.shape, tokens.data_ptr(), 1 / temperature, total.data_ptr(),
        grad.data_ptr(), out.data_ptr(), threads(),
    )  # fmt: skip
    return out


def draw(
    logits: Tensor, scales: Tensor, uniform: Tensor, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw D tokens by inverting cumulative distributions.

    Args:
        logits: float32[R, V].
        scales: float32[D], 1 / temperature of each, or 0 for the likeliest token.
        uniform: float64[D] in [0, 1).
        rows: int64[D], which logits each draws from; None when the i-th from the i-th.

    Returns:
        int64[D] tokens, and float32[D] their log-probs under the distribution they were drawn from (under the
        unscaled one where the scale is 0).
    """
    logits, scales = logits.contiguous(), scales.contiguous()
    count = len(scales)
    tokens, logprobs = torch.empty(count, dtype=torch.int64), torch.empty(count)
    draws = _Draws(
        logits=logits.data_ptr(),
        scales=scales.data_ptr(),
        rows=None if rows is None else rows.data_ptr(),
        uniform=uniform.data_ptr(),
        count=count,
        size=logits.shape[1],
        tokens=tokens.data_ptr(),
        logprobs=logprobs.data_ptr(),
    )
    check(kernel("draw")(byref(draws), threads()), "drawing tokens")
    return tokens, logprobs


def attend_paged(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, step: Step, *, layer: int, scale: float, window: int
) -> Tensor:
    """Keep float32[N, KV, D] keys and values, then attend from float32[N, H, D]; returns float32[N, H, D].

    What lies after the rows of the step is passed over, and zero in the result.

    Args:
        scale: of the scores.
        window: tokens a query sees, itself among them; 0 means all.
    """
    q, k, v = (_rows(x) for x in (q, k, v))
    out = torch.zeros(q.shape)
    call = _Paged(
        cache=ctypes.pointer(cache),
        step=ctypes.pointer(step),
        q=q.data_ptr(),
        out=out.data_ptr(),
        layer=layer,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        size=q.shape[2],
        window=window,
        q_stride=q.stride(0),
        out_stride=out.stride(0),
        scale=scale,
        k=k.data_ptr(),
        v=v.data_ptr(),
        k_stride=k.stride(0),
        v_stride=v.stride(0),
    )
    check(kernel("attend_paged")(byref(call), threads()), "attention")
    return out


class Spans:
    """Where packed sequences lie in the flat tokens.

    Args:
        starts, lengths: int64[S], of each sequence.
        prefix_of: int64[S], the sequence whose tokens come before this one's, or -1.

    Sequences that share a prefix are kept together, for one thread to sum up their gradients in one order.
    """

    def __init__(self, starts: Tensor, lengths: Tensor, prefix_of: Tensor) -> None:
        of = torch.where(prefix_of < 0, torch.arange(len(starts)), prefix_of)
        order = torch.argsort(of, stable=True)
        _, counts = torch.unique_consecutive(of[order], return_counts=True)
        self.family = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        self.starts, self.lengths = starts[order], lengths[order]
        has = prefix_of[order] >= 0
        self.prefix_starts = torch.where(has, starts[of[order]], 0)
        self.prefixes = torch.where(has, lengths[of[order]], 0)

    def fields(self) -> dict[str, int]:
        """What struct packed is told of them."""
        names = ("starts", "lengths", "prefix_starts", "prefixes", "family")
        pointers = {name: getattr(self, name).data_ptr() for name in names}
        return {**pointers, "sequences": len(self.starts), "families": len(self.family) - 1}


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, spans: Spans, *, scale: float, window: int = 0
) -> tuple[Tensor, Tensor]:
    """Causal attention of packed sequences: float32[N, H, D], and float32[N, H] logs of the denominators.

    Args:
        q: float32[N, H, D].
        k, v: float32[N, KV, D].
        scale: of the scores.
        window: tokens a query sees, itself among them; 0 means all.
    """
    q, k, v = (_rows(x) for x in (q, k, v))
    out, total = torch.zeros(q.shape), torch.zeros(q.shape[:2])
    packed = _packed((q, k, v, out, total), spans, scale, window)
    check(kernel("attend_packed")(byref(packed), threads()), "attention")
    return out, total


def attend_packed_backward(
    grad: Tensor,
    forward: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    spans: Spans,
    *,
    scale: float,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of the output; `forward` is q, k, v and both results."""
    q, k, v = (_rows(x) for x in forward[:3])
    grad = grad.contiguous()
    grad_q, grad_k, grad_v = (torch.zeros(x.shape) for x in (q, k, v))
    packed = _packed((q, k, v, *forward[3:]), spans, scale, window)
    packed.grad_out = grad.data_ptr()
    packed.grad_q, packed.grad_k, packed.grad_v = (x.data_ptr() for x in (grad_q, grad_k, grad_v))
    failed = kernel("attend_packed_backward")(byref(packed), threads())
    check(failed, "the gradient of attention")
    return grad_q, grad_k, grad_v


def _packed(
    forward: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], spans: Spans, scale: float, window: int
) -> _Packed:
    q, k, v, out, total = forward
    return _Packed(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        q_stride=q.stride(0),
        k_stride=k.stride(0),
        v_stride=v.stride(0),
        heads=q.shape[1],
        kv_heads=k.shape[1],
        size=q.shape[2],
        window=window,
        scale=scale,
        out=out.data_ptr(),
        log_total=total.data_ptr(),
        **spans.fields(),
    )


def threads() -> int:
    """How many threads kernels use: as many as torch."""
    return torch.get_num_threads()


def _rows(x: Tensor) -> Tensor:
    """`x` with the heads of a row side by side."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def check(failed: int, where: str) -> None:
    """Raise WorkFailedError where a kernel returned that memory ran out."""
    if failed:
        raise WorkFailedError("out of memory", where=where, remedy="use shorter sequences or smaller batches")
