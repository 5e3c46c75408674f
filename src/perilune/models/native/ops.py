"""The C kernels over torch tensors: float32, on the CPU, forward only.

Every function needs `available()`; shapes are as the decoder's. Arguments that the caller vouches for (kinds,
shapes that belong together) are not checked again here.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from perilune.errors import WorkFailedError
from perilune.models.native.build import native

PANEL = 32
LANES = 16

WeightKind = Literal["float32", "bfloat16", "int8"]
_KINDS: dict[WeightKind, tuple[int, torch.dtype]] = {
    "float32": (0, torch.float32),
    "bfloat16": (1, torch.bfloat16),
    "int8": (2, torch.int8),
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


@cache
def _library() -> ctypes.CDLL:
    library = native().library
    assert library is not None
    library.perilune_pack.argtypes = [c_void_p, *[c_int64] * 4, c_void_p, c_void_p]
    library.perilune_linear.argtypes = [
        c_void_p,
        c_int64,
        c_int64,
        POINTER(Weight),
        c_void_p,
        c_void_p,
        c_int64,
    ]
    library.perilune_rms_norm.argtypes = [
        c_void_p,
        c_int64,
        c_int64,
        c_void_p,
        c_int64,
        c_float,
        c_void_p,
        c_void_p,
    ]
    library.perilune_rotate.argtypes = [c_void_p, *[c_int64] * 3, c_void_p, c_void_p, c_int64, c_void_p]
    library.perilune_swiglu.argtypes = [c_void_p, c_void_p, c_int64, c_void_p]
    library.perilune_token_logprobs.argtypes = [
        c_void_p,
        c_int64,
        c_int64,
        c_void_p,
        c_float,
        c_void_p,
        c_void_p,
    ]
    library.perilune_draw.argtypes = [c_void_p, c_int64, c_int64, *[c_void_p] * 4]
    for attention in (library.perilune_attend_packed, library.perilune_attend_packed_backward):
        attention.argtypes = [POINTER(_Packed), c_int64]
    return library


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
    number, dtype = _KINDS[kind]
    count = -(-outputs // PANEL) * PANEL
    panels = torch.empty(count * inputs, dtype=dtype)
    scale = torch.empty(count if kind == "int8" else 0)
    _library().perilune_pack(
        weight.data_ptr(), outputs, inputs, weight.stride(0), number, panels.data_ptr(), scale.data_ptr()
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
        number,
    )
    return PackedWeight(struct, (panels, scale, padded))


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """float32[N, O] = float32[N, I] times the weight, plus its bias."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape[0], weight.outputs)
    rounded = None
    if weight.struct.kind == _KINDS["bfloat16"][0]:
        rounded = torch.empty(x.shape[0] * x.stride(0), dtype=torch.bfloat16)
    _library().perilune_linear(
        x.data_ptr(),
        x.shape[0],
        x.stride(0),
        byref(weight.struct),
        out.data_ptr(),
        None if rounded is None else rounded.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) * weight over the last axis, and 1 / rms(x) of each row, float32[..., 1].

    `weight` is float32[D], or float32[H, D] for float32[N, H, D].
    """
    x, weight = x.contiguous(), weight.contiguous()
    out, factor = torch.empty_like(x), torch.empty(*x.shape[:-1], 1)
    size = x.shape[-1]
    _library().perilune_rms_norm(
        x.data_ptr(),
        x.numel() // size,
        size,
        weight.data_ptr(),
        weight.numel() // size,
        eps,
        out.data_ptr(),
        factor.data_ptr(),
    )
    return out, factor


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, direction: int = 1) -> Tensor:
    """float32[N, H, D] turned by the angles of float32[N, D / 2] cosines and sines."""
    x, cosine, sine = x.contiguous(), cosine.contiguous(), sine.contiguous()
    out = torch.empty_like(x)
    _library().perilune_rotate(
        x.data_ptr(), *x.shape, cosine.data_ptr(), sine.data_ptr(), direction, out.data_ptr()
    )
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _library().perilune_swiglu(gate.data_ptr(), up.data_ptr(), gate.numel(), out.data_ptr())
    return out


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at int64[N] tokens, and the logs of the denominators: float32[N] each."""
    logits, tokens = logits.contiguous(), tokens.contiguous()
    out, total = torch.empty(len(logits)), torch.empty(len(logits))
    _library().perilune_token_logprobs(
        logits.data_ptr(), *logits.shape, tokens.data_ptr(), 1 / temperature, out.data_ptr(), total.data_ptr()
    )
    return out, total


def draw(logits: Tensor, scales: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """A token for each row and its log-prob.

    Args:
        logits: float32[B, V].
        scales: float32[B], 1 / temperature of each row, or 0 for the likeliest token.
        uniform: float64[B] in [0, 1).

    Returns:
        int64[B] and float32[B].
    """
    tokens, logprobs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
    failed = _library().perilune_draw(
        logits.data_ptr(),
        *logits.shape,
        scales.data_ptr(),
        uniform.data_ptr(),
        tokens.data_ptr(),
        logprobs.data_ptr(),
    )
    _check(failed, "drawing tokens")
    return tokens, logprobs


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
    packed = _packed(q, k, v, out, total, spans, scale, window)
    _check(_library().perilune_attend_packed(byref(packed), torch.get_num_threads()), "attention")
    return out, total


def attend_packed_backward(
    grad: Tensor,
    forward: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    spans: Spans,
    *,
    scale: float,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from float32[N, H, D], that of the output; `forward` is q, k, v and both results."""
    q, k, v = (_rows(x) for x in forward[:3])
    grad = grad.contiguous()
    grad_q, grad_k, grad_v = (torch.zeros(x.shape) for x in (q, k, v))
    packed = _packed(q, k, v, forward[3], forward[4], spans, scale, window)
    packed.grad_out = grad.data_ptr()
    packed.grad_q, packed.grad_k, packed.grad_v = (x.data_ptr() for x in (grad_q, grad_k, grad_v))
    failed = _library().perilune_attend_packed_backward(byref(packed), torch.get_num_threads())
    _check(failed, "the gradient of attention")
    return grad_q, grad_k, grad_v


def _packed(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, spans: Spans, scale: float, window: int
) -> _Packed:
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


def _rows(x: Tensor) -> Tensor:
    """`x` with the heads of a row side by side."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _check(failed: int, where: str) -> None:
    if failed:
        raise WorkFailedError("out of memory", where=where, remedy="use shorter sequences or smaller batches")
