"""Attention over a packed batch in which the completions of a group share one prompt."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.learn.batch import Layout


class SharedPromptAttention:
    """Causal attention: a prompt token sees its prompt so far, a completion token also its own past.

    Called by the decoder once a layer with q float[N, H, D], k and v float[N, KV, D]; gives [N, H, D].
    Tokens are gathered into padded rows (prompts apart from completions), because one batched product is
    faster than many small ones. A row's keys stand in the order of their positions from column 0, as they
    do in a KV cache, so that sums run in the order in which they ran when the tokens were sampled.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        prompts = torch.tensor(layout.prompt_lengths)
        completions = torch.tensor(layout.completion_lengths)
        of = torch.tensor(layout.prompt_of)
        prompt_starts = prompts.cumsum(0) - prompts
        starts = prompts.sum() + completions.cumsum(0) - completions
        none = torch.zeros_like(prompts)
        self._parts = [_Rows(prompt_starts, none, prompt_starts, prompts, device)]
        if int(completions.max()):
            self._parts.append(_Rows(prompt_starts[of], prompts[of], starts, completions, device))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [part(q, k, v) for part in self._parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


_LEAST_ROWS, _COLUMNS = 4, 16
"""Below 4 queries or 12 keys a batched product takes other paths, which round differently."""

_MOST_SCORES = 2**24
"""Above this many (64 MB in float32) probabilities are no longer kept: a fused kernel works them out again."""


class _Rows:
    """Rows of queries with their keys, as indices into the flat tokens.

    Row e attends from tokens start[e] .. start[e] + length[e] to those, and to the `past[e]` tokens from
    past_start[e] before them. Padded to T queries and S keys.
    """

    def __init__(
        self, past_start: Tensor, past: Tensor, start: Tensor, length: Tensor, device: torch.device
    ) -> None:
        query = torch.arange(max(int(length.max()), _LEAST_ROWS))
        key = torch.arange(-(-int((past + length).max()) // _COLUMNS) * _COLUMNS)
        past, past_start, start, length = (t[:, None] for t in (past, past_start, start, length))
        real = query < length
        queries = torch.where(real, start + query, 0)
        keys = torch.where(key < past, past_start + key, start + key - past)
        keys = torch.where(key < past + length, keys, 0)
        self._queries, self._keys = queries.to(device), keys.to(device)
        self._real = real.flatten().nonzero().squeeze(1).to(device)
        self._hidden = (key > (past + query)[:, :, None]).to(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, groups, size = q.shape[1], k.shape[1], q.shape[2]
        # Heads that share keys become further queries: [E * KV, T * H / KV, D] against [E * KV, S, D].
        rows, length = self._queries.shape
        queries = q.index_select(0, self._queries.flatten()).view(rows, length, groups, -1, size)
        queries = queries.transpose(1, 2).reshape(rows * groups, -1, size)
        keys, values = (
            t.index_select(0, self._keys.flatten()).view(rows, -1, groups, size).transpose(1, 2)
            for t in (k, v)
        )
        keys, values = (t.reshape(rows * groups, -1, size) for t in (keys, values))
        if q.device.type == "cpu" and queries.shape[0] * queries.shape[1] * keys.shape[1] <= _MOST_SCORES:
            out = _Attend.apply(queries, keys, values, self._hidden)  # type: ignore[no-untyped-call]
        else:
            hidden = self._hidden.repeat_interleave(heads // groups, dim=1).repeat_interleave(groups, dim=0)
            out = F.scaled_dot_product_attention(queries, keys, values, ~hidden)
        out = out.view(rows, groups, length, -1, size).transpose(1, 2).reshape(-1, heads, size)
        return out.index_select(0, self._real)  # type: ignore[no-any-return]


class _Attend(torch.autograd.Function):
    """softmax(q k^T / sqrt(D)) v where not hidden: batched products, the probabilities kept for the gradient.

    q: [B, T * H, D]; k, v: [B, S, D]; hidden: bool[E, T, S], B a multiple of E.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        rows, length, keys = hidden.shape
        q = q * q.shape[-1] ** -0.5
        scores = torch.bmm(q, k.transpose(1, 2))
        seen = scores.view(rows, -1, length, scores.shape[1] // length, keys)
        seen.masked_fill_(hidden.view(rows, 1, length, 1, keys), -torch.inf)
        probabilities = scores.softmax(-1)
        ctx.save_for_backward(q, k, v, probabilities)
        return torch.bmm(probabilities, v)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (gradient,) = gradients
        q, k, v, probabilities = ctx.saved_tensors
        of_v = torch.bmm(probabilities.transpose(1, 2), gradient)
        of_p = torch.bmm(gradient, v.transpose(1, 2))
        of_scores = torch.ops.aten._softmax_backward_data(of_p, probabilities, -1, of_p.dtype)
        of_k = torch.bmm(of_scores.transpose(1, 2), q)
        of_q = torch.bmm(of_scores, k).mul_(q.shape[-1] ** -0.5)
        return of_q, of_k, of_v, None
