"""The attention kernels: for packed sequences, forward and backward, and over a paged cache."""

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from perilune.models.native.ops import check, kernel, pointer_fields, strided_fields, threads


class Cache(Structure):
    """struct cache: the cache of one layer, see `PagedCache`."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        ("kind", c_int64),
        ("table", c_int64),
    )


class RouteMemory(Structure):
    """struct route_store."""

    _fields_ = (("experts", c_void_p), *((name, c_int64) for name in ("table", "bytes", "layers")))


class Step(Structure):
    """struct step: the tokens of one step."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "sequences", "tables_stride", "logit_count")),
        *((name, c_void_p) for name in ("tokens", "positions", "logit_rows", "sequence", "tables", "logits")),
        ("routes", RouteMemory),
    )


class _Paged(Structure):
    """struct attention_call."""

    _fields_ = (
        ("cache", POINTER(Cache)),
        ("step", POINTER(Step)),
        ("q", c_void_p),
        ("out", c_void_p),
        *((name, c_int64) for name in ("heads", "kv_heads", "size", "window", "q_stride", "out_stride")),
        ("scale", c_float),
        ("sinks", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
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
        ("sinks", c_void_p),
        ("out", c_void_p),
        ("log_total", c_void_p),
        *((name, c_void_p) for name in ("grad_out", "grad_q", "grad_k", "grad_v", "family")),
        ("families", c_int64),
        ("longest", c_int64),
        ("failed", c_int),
        ("next", ctypes.c_long),
    )


def attend_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    where: tuple[Cache, Step],
    *,
    scale: float,
    window: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Store keys and values float32[N, KV, D], then attend from queries float32[N, H, D] to float32[N, H, D].

    Rows after those of the step are padding: they are ignored, and are zero in the result.

    Args:
        where: the cache of the layer, and the tokens of the step.
        window: number of tokens that a query sees, including its own; 0 for all.
        sinks: float32[H], the score of each head's attention sink.
    """
    q, k, v = (_rows(x) for x in (q, k, v))
    cache, step = where
    out = torch.zeros(q.shape)
    call = _Paged(
        cache=ctypes.pointer(cache),
        step=ctypes.pointer(step),
        heads=q.shape[1],
        kv_heads=k.shape[1],
        size=q.shape[2],
        window=window,
        scale=scale,
        **strided_fields(q=q, k=k, v=v, out=out),
        **pointer_fields(sinks=sinks),
    )
    check(kernel("attend_paged", POINTER(_Paged), c_int64)(byref(call), threads()), "attention")
    return out


_OF_PACKED = (POINTER(_Packed), c_int64)


class Spans:
    """The positions of packed sequences in the flat tokens.

    Sequences that share a prefix become neighbors, so that one thread sums their gradients in a fixed order.

    Args:
        starts, lengths: int64[S], first token and number of tokens of each sequence.
        prefix_of: int64[S], index of the sequence that is the prefix of this one, or -1.
        prefixes: int64[S], length of the prefix in tokens; by default the whole sequence.
    """

    def __init__(
        self, starts: Tensor, lengths: Tensor, prefix_of: Tensor, prefixes: Tensor | None = None
    ) -> None:
        base = torch.where(prefix_of < 0, torch.arange(len(starts)), prefix_of)
        order = torch.argsort(base, stable=True)
        _, counts = torch.unique_consecutive(base[order], return_counts=True)
        self.family = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        self.starts, self.lengths = starts[order], lengths[order]
        has_prefix = prefix_of[order] >= 0
        self.prefix_starts = torch.where(has_prefix, starts[base[order]], 0)
        prefixes = lengths[base] if prefixes is None else prefixes
        self.prefixes = torch.where(has_prefix, prefixes[order], 0)

    def fields(self) -> dict[str, int | None]:
        """Return the fields of struct packed that describe the spans."""
        counts = {"sequences": len(self.starts), "families": len(self.family) - 1}
        return pointer_fields(**vars(self)) | counts


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Spans,
    *,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention float32[N, H, D], and the logs of its denominators float32[N, H].

    Args:
        q: float32[N, H, D].
        k, v: float32[N, KV, D].
        window: number of tokens that a query sees, including its own; 0 for all.
        sinks: float32[H], the score of each head's attention sink, which the denominators include.
    """
    q, k, v = (_rows(x) for x in (q, k, v))
    out, total = torch.zeros(q.shape), torch.zeros(q.shape[:2])
    packed = _packed((q, k, v, out, total), spans, scale=scale, window=window, **pointer_fields(sinks=sinks))
    check(kernel("attend_packed", *_OF_PACKED)(byref(packed), threads()), "attention")
    return out, total


def attend_packed_backward(
    grad: Tensor,
    forward: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    spans: Spans,
    *,
    scale: float,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    Args:
        grad: gradient of the attention output.
        forward: q, k, v and the two results of `attend_packed`.
    """
    q, k, v = (_rows(x) for x in forward[:3])
    grad = grad.contiguous()
    grad_q, grad_k, grad_v = (torch.zeros(x.shape) for x in (q, k, v))
    gradients = pointer_fields(grad_out=grad, grad_q=grad_q, grad_k=grad_k, grad_v=grad_v)
    packed = _packed((q, k, v, *forward[3:]), spans, scale=scale, window=window, **gradients)
    failed = kernel("attend_packed_backward", *_OF_PACKED)(byref(packed), threads())
    check(failed, "the gradient of attention")
    return grad_q, grad_k, grad_v


def _packed(
    forward: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], spans: Spans, **fields: float | None
) -> _Packed:
    q, k, v, out, total = forward
    tensors = {**strided_fields(q=q, k=k, v=v), **pointer_fields(out=out, log_total=total)}
    sizes = {"heads": q.shape[1], "kv_heads": k.shape[1], "size": q.shape[2]}
    return _Packed(**tensors, **sizes, **spans.fields(), **fields)


def _rows(x: Tensor) -> Tensor:
    """Return `x` with the heads of each row contiguous."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
