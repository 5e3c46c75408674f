"""The kernels of linear attention: the gated delta rule and the convolution before it, with gradients."""

from ctypes import POINTER, Structure, byref, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from perilune.models.native.ops import check, kernel, pointer_fields, strided_fields, threads

Rule = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""float32 q, k [N, KH, Dk], v [N, H, Dv], decay and strength [N, H] of the gated delta rule."""


class _Delta(Structure):
    """struct delta."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "decay", "strength")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride", "heads", "key_heads")),
        *((name, c_int64) for name in ("key_size", "value_size", "tokens", "pieces")),
        *((name, c_void_p) for name in ("piece", "states", "out", "grad_out", "grad_q", "grad_k", "grad_v")),
        *((name, c_void_p) for name in ("grad_decay", "grad_strength", "grad_states")),
        ("failed", c_int),
    )


class _Convolution(Structure):
    """struct convolution."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "before", "weight", "taps")),
        *((name, c_int64) for name in ("tokens", "channels", "width", "stride")),
        *((name, c_void_p) for name in ("out", "grad_out", "grad_x", "grad_weight")),
    )


def scan(rule: Rule, states: Tensor, pieces: Tensor) -> Tensor:
    """Return the outputs float32[N, H, Dv] of the gated delta rule, zero for tokens outside all pieces.

    Args:
        states: float32[rows, H, Dk, Dv], which pieces read at their start and write at their end.
        pieces: int64[P, 4], see `recurrence.Pieces`.
    """
    rule = _contiguous_heads(rule)
    out = torch.zeros(rule[2].shape)
    call = _delta(rule, states, pieces, out=out)
    check(kernel("scan", POINTER(_Delta), c_int64)(byref(call), threads()), "linear attention")
    return out


def scan_backward(grad: Tensor, rule: Rule, states: Tensor, pieces: Tensor) -> Rule:
    """Return the gradients of the rule's inputs from that of the output; `states` were written by `scan`."""
    rule, grad = _contiguous_heads(rule), grad.contiguous()
    grad_q, grad_k, grad_v, grad_decay, grad_strength = (torch.zeros(x.shape) for x in rule)
    grad_states = torch.zeros(states.shape)
    gradients = {"grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v, "grad_decay": grad_decay}
    gradients |= {"grad_strength": grad_strength, "grad_out": grad, "grad_states": grad_states}
    call = _delta(rule, states, pieces, **gradients)
    failed = kernel("scan_backward", POINTER(_Delta), c_int64)(byref(call), threads())
    check(failed, "the gradient of linear attention")
    return grad_q, grad_k, grad_v, grad_decay, grad_strength


def _contiguous_heads(rule: Rule) -> Rule:
    """Return the inputs with the heads of each token contiguous."""
    q, k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in rule[:3])
    return q, k, v, rule[3].contiguous(), rule[4].contiguous()


def _delta(rule: Rule, states: Tensor, pieces: Tensor, **others: Tensor) -> _Delta:
    q, k, v, decay, strength = rule
    return _Delta(
        **strided_fields(q=q, k=k, v=v),
        **pointer_fields(decay=decay, strength=strength, states=states, piece=pieces, **others),
        heads=v.shape[1],
        key_heads=q.shape[1],
        key_size=q.shape[2],
        value_size=v.shape[2],
        tokens=len(v),
        pieces=len(pieces),
    )


def convolve(x: Tensor, before: Tensor, taps: Tensor, weight: Tensor) -> Tensor:
    """Compute the SiLU of each channel's causal convolution, float32[N, C].

    Args:
        x: float32[N, C]; rows may be strided.
        before: float32[rows, C].
        taps: int64[N, K], the rows that each token reads, its own last; from N on, the rows of `before`.
        weight: float32[C, K].
    """
    x, before, weight = _rows(x), before.contiguous(), weight.t().contiguous()
    out = torch.empty(x.shape)
    call = _convolution(x, before, taps, weight, out=out)
    kernel("convolve", POINTER(_Convolution), c_int64)(byref(call), threads())
    return out


def convolve_backward(
    grad: Tensor, x: Tensor, before: Tensor, taps: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` and of the weight from that of the output."""
    x, before, weight, grad = _rows(x), before.contiguous(), weight.t().contiguous(), grad.contiguous()
    grad_x, grad_weight = torch.zeros(x.shape), torch.zeros(weight.shape)
    gradients = {"grad_out": grad, "grad_x": grad_x, "grad_weight": grad_weight}
    call = _convolution(x, before, taps, weight, **gradients)
    kernel("convolve_backward", POINTER(_Convolution), c_int64)(byref(call), threads())
    return grad_x, grad_weight.t()


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _convolution(x: Tensor, before: Tensor, taps: Tensor, weight: Tensor, **others: Tensor) -> _Convolution:
    return _Convolution(
        **pointer_fields(x=x, before=before, weight=weight, taps=taps, **others),
        tokens=x.shape[0],
        channels=x.shape[1],
        width=taps.shape[1],
        stride=x.stride(0),
    )
