"""Attention: the interface that the decoder uses, and the implementation for packed sequences.

The result of a query has the same bits whether it is computed inside its sequence (training, prefill) or
alone against a cache (decoding). The C kernels of `models/native` guarantee this. Without them, both cases
use `attend`. In float32 on a CPU, `attend` relies on three measured properties of MKL's products and of the
softmax kernel, which tests check:

* in a product of at least `_MIN_ROWS` rows and 12 columns, the bits of an element do not depend on its
  neighbors;
* the product sums up to 192 terms from left to right, so zeros after the end change nothing;
* the softmax sums in lanes of 16, so masked columns after the end change nothing.

So keys start at column 0 (with a window, at a multiple of 192), columns are padded to multiples of 16, sums
are split every 192 terms, and queries are padded to at least `_MIN_ROWS`. On other devices and in other
dtypes, results agree up to rounding.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from perilune.models.kernels import is_native
from perilune.models.native.attention import Spans, attend_packed, attend_packed_backward
from perilune.models.recurrence import PackedRecurrence

_COLUMN_MULTIPLE = 16
# With fewer rows MKL's products round differently: below 4 on AMD, below 12 on Intel (MKL 2024.2).
_MIN_ROWS = 16
_MAX_SUM_TERMS = 192
_QUERY_BLOCK = 512


@dataclass(frozen=True, slots=True, eq=False)
class ScoreOptions:
    """Changes to attention scores besides the softmax.

    Attributes:
        sinks: float[H], the score of each head's attention sink, which has no value (Xiao et al., arXiv
            2309.17453; learned as in gpt-oss).
        cap: bound c on scores, which become c tanh(scores / c) before masks and sinks (Gemma 2).
    """

    sinks: Tensor | None = None
    cap: float | None = None

    def for_sets(self, sets: int, kv_heads: int, rows: int) -> ScoreOptions:
        """Return the options with the sinks repeated for `sets` sets of query heads with `rows` rows each."""
        if self.sinks is None:
            return self
        sinks = self.sinks.view(kv_heads, -1, 1).expand(-1, -1, rows).reshape(kv_heads, -1, 1)
        return ScoreOptions(sinks.repeat(sets // kv_heads, 1, 1), self.cap)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """The properties of a layer that its attention needs besides the inputs.

    Attributes:
        index: index of the layer.
        window: number of tokens that a query sees, including its own (sliding-window attention, Beltagy et
            al. 2020); None for all preceding tokens. The same in every call of one layer.
        options: changes to the scores; None if there are none.
    """

    index: int
    window: int | None = None
    options: ScoreOptions | None = None


class Attention(Protocol):
    """Causal attention of one layer. Implementations hold the KV cache or the bounds of sequences.

    Args:
        q: float[N, H, D], after the rotary embedding, scaled for scores of q k^T / sqrt(D).
        k, v: float[N, KV, D] and float[N, KV, E]; H is a multiple of KV.

    Returns:
        float[N, H, E].
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor: ...


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: ScoreOptions | None = None) -> Tensor:
    """Compute softmax(q k^T / sqrt(D) + mask) v for R independent sets of queries and keys.

    Args:
        q: float[R, M, D].
        k, v: float[R, T, D] and float[R, T, E], T a multiple of 16; finite even where masked.
        mask: float, broadcastable to [R, M, T]: 0 where a query sees a key, otherwise -inf. Each query must
            see a key. The column of a key is its position in the sequence, minus a multiple of 192.
        options: with sinks float[R, M, 1].

    Returns:
        float[R, M, E].
    """
    if q.device.type == "cuda" and options is None:
        return attend_fused(q, k, v, mask)
    rows = q.shape[1]
    if rows < _MIN_ROWS:
        padding = (0, 0, 0, _MIN_ROWS - rows)
        mask = mask if mask.shape[1] == 1 else F.pad(mask, padding)
        if options is not None and options.sinks is not None:
            options = ScoreOptions(F.pad(options.sinks, padding), options.cap)
        return attend(F.pad(q, padding), k, v, mask, options)[:, :rows]
    weights = _attention_weights(q, k, mask, options or ScoreOptions()).to(v.dtype)
    if v.shape[1] <= _MAX_SUM_TERMS:
        return torch.bmm(weights, v)
    parts = zip(torch.split(weights, _MAX_SUM_TERMS, 2), torch.split(v, _MAX_SUM_TERMS, 1), strict=True)
    return reduce(torch.add, (torch.bmm(part, values) for part, values in parts))


def _attention_weights(q: Tensor, k: Tensor, mask: Tensor, options: ScoreOptions) -> Tensor:
    """Compute the weights [R, M, T] of the keys, in float32 at least."""
    q, k = q * q.shape[-1] ** -0.5, k.transpose(1, 2)
    scores = (
        torch.baddbmm(mask, q, k) if options.cap is None else soft_cap(torch.bmm(q, k), options.cap) + mask
    )
    dtype, columns = torch.promote_types(scores.dtype, torch.float32), scores.shape[-1]
    if options.sinks is not None:
        # Padded to a full multiple of columns, like the masked columns after the end.
        sinks = F.pad(options.sinks.to(scores.dtype), (0, _COLUMN_MULTIPLE - 1), value=-torch.inf)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:2], -1)], dim=-1)
    return scores.softmax(-1, dtype=dtype)[..., :columns]


def soft_cap(x: Tensor, bound: float) -> Tensor:
    """Return bound * tanh(x / bound)."""
    return (x / bound).tanh() * bound


def attend_fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute `attend` with torch's fused kernel, which stores no scores and sums in float32."""
    q, k, v, mask = (x[:, None] for x in (q, k, v, mask))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0]


def round_up_columns(length: int) -> int:
    """Round `length` up to a multiple of 16 columns."""
    return -(-length // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE


class PackedAttention:
    """Causal attention within each of several sequences, which are concatenated on one token axis.

    Args:
        cu_seqlens: int64[S + 1], the start of each sequence, then N (as in FlashAttention).
        prefix_of: int64[S], index of the sequence that is the prefix of this one, or -1. Several sequences
            may share a prefix, such as completions of one prompt. A prefix has no prefix itself.
        prefix_lengths: int64[S], length of the prefix in tokens; by default the whole sequence.
    """

    def __init__(
        self, cu_seqlens: Tensor, prefix_of: Tensor | None = None, prefix_lengths: Tensor | None = None
    ) -> None:
        self._device = cu_seqlens.device
        starts, lengths = cu_seqlens[:-1].cpu(), cu_seqlens.diff().cpu()
        base = torch.full_like(starts, -1) if prefix_of is None else prefix_of.cpu()
        prefixes = torch.where(base < 0, 0, lengths[base] if prefix_lengths is None else prefix_lengths.cpu())
        spans = torch.stack([starts, lengths, starts[base], prefixes], dim=1)
        sizes = np.array([_padded_length(length) for length in lengths.tolist()])
        self._spans = [spans[sizes == size] for size in np.unique(sizes) if size]
        self._shared = prefix_of is not None
        self._layout: _PaddedLayout | None = None
        self._long_spans = spans.tolist() if bool((lengths > _QUERY_BLOCK).any()) else None
        self._native_spans = Spans(starts, lengths, base, prefixes)
        self._all_spans = spans

    @cached_property
    def _flash(self) -> FlashAttention:
        return FlashAttention(self._all_spans, self._device)

    @cached_property
    def recurrence(self) -> PackedRecurrence:
        """The recurrent layers for these sequences."""
        return PackedRecurrence(self._all_spans, self._device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        window, options = layer.window, layer.options
        bounded = options is not None and options.cap is not None
        if is_native(q, q.shape[-1]) and v.shape == k.shape and not bounded:
            sinks = None if options is None else options.sinks
            attended: Tensor = _NativeAttention.apply(q, k, v, sinks, self._native_spans, window or 0)  # type: ignore[no-untyped-call]
            return attended
        if q.device.type == "cuda" and options is None and can_use_flash(q, v):
            return self._flash(q, k, v, window)
        if self._long_spans is not None and q.device.type != "cpu" and options is None:
            return _attend_each_sequence(q, k, v, self._long_spans, window)
        if self._layout is None:
            self._layout = _PaddedLayout(self._spans, self._shared, q, k, exact=options is not None)
        return self._layout(q, k, v, window, options)


class FlashAttention:
    """Packed attention by torch's variable-length FlashAttention (Dao, arXiv 2307.08691).

    One kernel computes all sequences. Sums are float32.

    Args:
        spans: int64[S, 4]: start, length, start of the prefix, and length of the prefix of each sequence, in
            the order of the sequences.
    """

    def __init__(self, spans: Tensor, device: torch.device) -> None:
        spans = spans[spans[:, 1] > 0]
        start, length, prefix_start, prefix = spans.unbind(1)
        total = prefix + length
        self._keys: Tensor | None = None
        if bool(prefix.any()):
            parts = zip(start.tolist(), length.tolist(), prefix_start.tolist(), prefix.tolist(), strict=True)
            ranges = (
                torch.arange(first, first + count)
                for own, own_count, before, before_count in parts
                for first, count in ((before, before_count), (own, own_count))
            )
            self._keys = torch.cat(list(ranges)).to(device)
        self._bounds = tuple(
            F.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32) for lengths in (length, total)
        )
        self._longest = int(length.max()), int(total.max())

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        group = q.shape[1] // k.shape[1]
        if self._keys is not None:  # in float32, so that the gradients of a shared prefix add in float32
            k, v = (x.float().index_select(0, self._keys).to(x.dtype) for x in (k, v))
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        window_size = (-1 if window is None else window - 1, 0)
        attend_all = find_varlen_attn()
        assert attend_all is not None
        out: Tensor = attend_all(q.contiguous(), k, v, *self._bounds, *self._longest, window_size=window_size)
        return out


@functools.cache
def find_varlen_attn() -> Callable[..., Any] | None:
    """Return torch's attention for packed sequences; None before torch 2.11, where it lacks windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "window_size" in inspect.signature(varlen_attn).parameters else None


def can_use_flash(q: Tensor, v: Tensor) -> bool:
    """Return whether `FlashAttention` supports heads of this size and dtype on this GPU."""
    size = q.shape[-1]
    fits = q.dtype == torch.bfloat16 and size == v.shape[-1] and size % 8 == 0 and size <= 256
    return fits and find_varlen_attn() is not None and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _attend_each_sequence(
    q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Sequence[int]], window: int | None
) -> Tensor:
    """Compute packed attention with torch's fused kernels, one sequence at a time.

    The kernels apply the causal mask without storing scores, so memory grows linearly with the length.

    Args:
        spans: start, length, start of the prefix, and length of the prefix of each sequence, in order.
    """
    outs = []
    for start, length, prefix_start, prefix in spans:
        if not length:
            continue
        own = slice(start, start + length)
        before = slice(prefix_start, prefix_start + prefix)
        keys, values = (torch.cat([x[before], x[own]]) if prefix else x[own] for x in (k, v))
        outs.append(_attend_causal(q[own], keys, values, window))
    return torch.cat(outs)


def _attend_causal(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Compute attention float[L, H, D] of the last L queries over float[T, KV, D] keys."""
    length, total = len(q), len(k)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if window is None or window >= total:
        # The kernels' causal mask aligns the first query with the first key, so pad queries at the beginning.
        q = F.pad(q, (0, 0, total - length, 0))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out[0, :, total - length :].transpose(0, 1)
    outs = []
    for first in range(0, length, _QUERY_BLOCK):
        rows = torch.arange(first, min(first + _QUERY_BLOCK, length), device=q.device) + total - length
        span = slice(max(0, first + total - length - window + 1), first + total - length + len(rows))
        columns = torch.arange(span.start, span.stop, device=q.device)
        visible = (columns <= rows[:, None]) & (columns > rows[:, None] - window)
        chunk = q[:, :, first : first + len(rows)], k[:, :, span], v[:, :, span], visible
        outs.append(F.scaled_dot_product_attention(*chunk))
    return torch.cat(outs, dim=2)[0].transpose(0, 1)


class _NativeAttention(torch.autograd.Function):
    """Attention and its gradient by the C kernels."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *where: Any) -> Tensor:
        spans, window = where
        scale = q.shape[-1] ** -0.5
        out, total = attend_packed(q, k, v, spans, scale=scale, window=window, sinks=sinks)
        ctx.save_for_backward(q, k, v, out, total, sinks)
        ctx.spans, ctx.scale, ctx.window = spans, scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        grad_qkv = attend_packed_backward(grad, tuple(saved), ctx.spans, scale=ctx.scale, window=ctx.window)
        grad_sinks = None
        if sinks is not None:  # a sink has the value 0, so its gradient is weight * (0 - dO . O)
            out, total = saved[3:]
            grad_sinks = -((sinks - total).exp() * (grad * out).sum(-1)).sum(0)
        return *grad_qkv, grad_sinks, None, None


def _padded_length(length: int) -> int:
    """Return the length to which a sequence is padded: 16, 32, 48, 64, 96, 128, 192, 256, ... tokens."""
    step = _COLUMN_MULTIPLE
    while step * 4 < length:
        step *= 2
    return -(-length // step) * step


class _PaddedLayout:
    """Packed sequences copied into padded blocks, one block per padded length, and attention on the blocks.

    Args:
        spans: int64[sequences, 4] for each block: start, length, start of the prefix, length of the prefix.
        shared: whether a token may be a key of several sequences.
        q, k: tensors with the shape, dtype and device of later calls.
        exact: whether to compute as on a CPU also on other devices: in chunks of queries that store their
            scores.
    """

    def __init__(
        self, spans: Sequence[Tensor], shared: bool, q: Tensor, k: Tensor, *, exact: bool = False
    ) -> None:
        heads, kv_heads = q.shape[1], k.shape[1]
        self._exact = exact or q.device.type == "cpu"
        self._shapes: list[tuple[int, Tensor, int]] = []
        self._blocks: dict[int | None, list[_PaddedBlock]] = {}
        queries, keys = [], []
        for block in spans:
            start, length, prefix_start, prefix = block[:, :, None].unbind(1)
            row = torch.arange(max(int(length.max()), _MIN_ROWS))
            column = torch.arange(round_up_columns(int(prefix.max()) + len(row)))
            key = torch.where(column < prefix, prefix_start + column, start + column - prefix)
            queries.append(_head_rows(torch.where(row < length, start + row, -1), heads))
            keys.append(_head_rows(torch.where(column < prefix + length, key, -1), kv_heads))
            self._shapes.append((len(row), prefix, len(block)))
        self._queries = _PaddedRows(queries, q, unique=True)
        self._keys = _PaddedRows(keys, k, unique=not shared)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, window: int | None, options: ScoreOptions | None
    ) -> Tensor:
        if window not in self._blocks:
            self._blocks[window] = [
                _PaddedBlock(*shape, window=window, like=(q, k), exact=self._exact) for shape in self._shapes
            ]
        padded_q, padded_k, padded_v = self._queries.pad(q), self._keys.pad(k), self._keys.pad(v)
        parts = zip(self._blocks[window], padded_q, padded_k, padded_v, strict=True)
        outs = [block(q, k, v, options) for block, q, k, v in parts]
        return self._queries.unpad(outs).view(*q.shape[:2], -1)


def _head_rows(tokens: Tensor, heads: int) -> Tensor:
    """Return the rows int64[S, heads, L] of tokens int64[S, L] in a tensor [N * heads, D]; -1 stays -1."""
    rows = tokens[:, None] * heads + torch.arange(heads)[:, None]
    return torch.where(tokens[:, None] < 0, -1, rows)


class _PaddedRows:
    """A mapping between flat rows and the rows of padded blocks.

    Args:
        blocks: for each block, the flat row of each of its rows, int64 of any shape, -1 for padding.
        like: a tensor float[N, heads, D] with the shape and device of later calls.
        unique: whether each flat row occurs at most once. `unpad` requires exactly once.
    """

    def __init__(self, blocks: Sequence[Tensor], like: Tensor, unique: bool) -> None:
        self._sizes = [block.numel() for block in blocks]
        flat = torch.cat([block.flatten() for block in blocks])
        self._padding = (flat < 0).nonzero()[:, 0].to(like.device)
        self._source = flat.clamp(min=0).to(like.device)
        self._target = None
        if unique:
            target = torch.empty(like.shape[0] * like.shape[1], dtype=torch.int64)
            real = (flat >= 0).nonzero()[:, 0]
            target[flat[real]] = real
            self._target = target.to(like.device)

    def pad(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return float[rows, D] of each block from float[N, heads, D]. Padding rows have arbitrary values."""
        return torch.split(_gather(x.reshape(-1, x.shape[-1]), self._source, self._target, None), self._sizes)

    def unpad(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return the flat rows of padded blocks, the inverse of `pad`."""
        rows = blocks[0] if len(blocks) == 1 else torch.cat(list(blocks))
        assert self._target is not None
        return _gather(rows, self._target, self._source, self._padding)


def _gather(x: Tensor, index: Tensor, back: Tensor | None, unused: Tensor | None) -> Tensor:
    return _Gather.apply(x, index, back, unused)  # type: ignore[no-any-return,no-untyped-call]


class _Gather(torch.autograd.Function):
    """y = x[index]. The gradient uses the inverse index `back` if it exists, with zeros at `unused`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor | None, unused: Tensor | None) -> Tensor:
        ctx.rows, ctx.index, ctx.back, ctx.unused = len(x), index, back, unused
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.back is None:
            return grad.new_zeros(ctx.rows, grad.shape[1]).index_add_(0, ctx.index, grad), None, None, None
        grad_x = grad.index_select(0, ctx.back)
        if ctx.unused is not None:
            grad_x.index_fill_(0, ctx.unused, 0.0)
        return grad_x, None, None, None


class _PaddedBlock:
    """Attention of S sequences padded to one length of L queries and T keys.

    Query heads that share keys are stacked into one product. Long sequences are computed in chunks of
    queries, which the backward pass recomputes, so that memory grows linearly with T.
    """

    def __init__(
        self,
        length: int,
        prefix: Tensor,
        sequences: int,
        *,
        window: int | None,
        like: tuple[Tensor, Tensor],
        exact: bool,
    ) -> None:
        q, k = like
        heads, kv_heads = q.shape[1], k.shape[1]
        self._kv_heads = kv_heads
        self._sets, self._group, self._length = sequences * kv_heads, heads // kv_heads, length
        self._shape = sequences, heads, length, q.shape[-1]
        self._exact = exact
        equal = bool((prefix == prefix[0]).all())
        prefix = prefix[:1] if equal else prefix
        self._chunks = []
        for start in range(0, length, _QUERY_BLOCK):
            stop = min(start + _QUERY_BLOCK, length)
            query = prefix[:, :, None] + torch.arange(start, stop)[:, None]
            unseen = 0 if window is None else max(0, int(query.min()) - window + 1)
            columns = slice(unseen // _MAX_SUM_TERMS * _MAX_SUM_TERMS, round_up_columns(int(query.max()) + 1))
            column = torch.arange(columns.start, columns.stop)
            visible = column <= query if window is None else (column <= query) & (column > query - window)
            mask = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf).to(q)[:, None]
            if self._exact:
                mask = mask[:, None].expand(-1, 1 if equal else kv_heads, self._group, -1, -1)
                mask = mask.flatten(2, 3).flatten(0, 1)
            self._chunks.append((slice(start, stop), columns, mask))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions | None) -> Tensor:
        """Return float[S * H * L, E] from float[S * H * L, D] and float[S * KV * T, D] and [..., E]."""
        size, out_size = q.shape[-1], v.shape[-1]
        k, v = k.view(self._sets, -1, size), v.view(self._sets, -1, out_size)
        if not self._exact:
            k, v = (x.repeat_interleave(self._group, dim=0) for x in (k, v))
            k, v = (x.view(*self._shape[:2], *x.shape[1:]) for x in (k, v))
            ((_, columns, mask),) = self._chunks  # longer sequences are computed one by one
            k, v = k[:, :, columns], v[:, :, columns]
            out = F.scaled_dot_product_attention(q.view(self._shape), k, v, attn_mask=mask)
            return out.reshape(-1, out_size)
        if len(self._chunks) == 1:
            _, columns, mask = self._chunks[0]
            q = q.view(self._sets, -1, size)
            out = attend(q, k[:, columns], v[:, columns], mask, self._options_for_sets(options, q))
            return out.reshape(-1, out_size)
        q = q.view(self._sets, self._group, self._length, size)
        outs = []
        for rows, columns, mask in self._chunks:
            queries = q[:, :, rows].flatten(1, 2)
            chunk = queries, k[:, columns], v[:, columns], mask, self._options_for_sets(options, queries)
            out = checkpoint(attend, *chunk, use_reentrant=False) if q.requires_grad else attend(*chunk)
            outs.append(out.view(self._sets, self._group, -1, out_size))
        return torch.cat(outs, dim=2).view(-1, out_size)

    def _options_for_sets(self, options: ScoreOptions | None, q: Tensor) -> ScoreOptions | None:
        """Return the options of `attend` for these queries of all sets."""
        if options is None:
            return None
        rows = q.numel() // q.shape[-1] // (self._sets * self._group)
        return options.for_sets(self._sets, self._kv_heads, rows)
