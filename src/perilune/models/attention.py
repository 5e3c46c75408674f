"""Attention over flat tokens: what the decoder asks for, and the version for whole packed sequences."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Attention(Protocol):
    """Causal attention of one layer; what it remembers (a KV cache, segment bounds) is its own affair.

    Args:
        layer: index of the layer.
        q: float[N, H, D], after the rotary embedding.
        k, v: float[N, KV, D]; H is a multiple of KV.

    Returns:
        float[N, H, D].
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class PackedAttention:
    """Causal attention inside each of several sequences that lie end to end in the flat token axis.

    Args:
        cu_seqlens: int64[S + 1], where each sequence starts, closed by N (as in FlashAttention).
    """

    def __init__(self, cu_seqlens: Tensor) -> None:
        starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
        longest = int(lengths.max())
        column = torch.arange(longest, device=cu_seqlens.device)
        self._real = column < lengths[:, None]
        self._gather = (starts[:, None] + column).clamp(max=int(cu_seqlens[-1]) - 1)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, keys, values = (x[self._gather].transpose(1, 2) for x in (q, k, v))
        shared = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=shared)
        return out.transpose(1, 2)[self._real]


def cached_attention(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """Attention of one query a sequence over what the sequence holds so far.

    Args:
        q: [B, H, D].
        keys, values: [B, KV, T, D]; must be finite everywhere, also where hidden.
        hidden: bool[B, T], true on columns the query must not see.

    Returns:
        [B, H, D].
    """
    rows, heads, size = q.shape
    groups = keys.shape[1]
    grouped = q.view(rows, groups, heads // groups, size) * size**-0.5
    scores = grouped @ keys.transpose(-1, -2)
    weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
    out: Tensor = weights @ values
    return out.view(rows, heads, size)
