"""Attention over a packed batch in which the completions of a group share one prompt."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.learn.batch import Layout


class SharedPromptAttention:
    """Causal attention: a prompt token sees its prompt so far, a completion token also its own past.

    Called by the decoder once a layer with q float[N, H, D], k and v float[N, KV, D]; gives [N, H, D].
    Tokens are gathered into padded rows (prompts apart from completions), because one batched product is
    faster than many small ones.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        prompt_lengths = torch.tensor(layout.prompt_lengths)
        lengths = torch.tensor(layout.completion_lengths)
        self._prompt_tokens = int(prompt_lengths.sum())
        prompt_index, prompt_valid = _padded(prompt_lengths, 0)
        index, valid = _padded(lengths, self._prompt_tokens)
        of = torch.tensor(layout.prompt_of)
        self._prompts = _Rows(prompt_index, prompt_valid, prompt_index, _causal(prompt_valid), device)
        self._completions = None
        if bool(valid.any()):
            shared = prompt_valid[of].unsqueeze(1).expand(-1, index.shape[1], -1)
            visible = torch.cat([shared, _causal(valid)], dim=2)
            keys = torch.cat([prompt_index[of], index], dim=1)
            self._completions = _Rows(index, valid, keys, visible, device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        prompts = self._prompts(q, k, v)
        return prompts if self._completions is None else torch.cat([prompts, self._completions(q, k, v)])


class _Rows:
    """Rows of queries with their keys: indices into the flat tokens, padded, with what each query sees."""

    def __init__(
        self, queries: Tensor, valid: Tensor, keys: Tensor, visible: Tensor, device: torch.device
    ) -> None:
        self._shape, self._key_shape = queries.shape, keys.shape
        self._queries, self._keys = queries.flatten().to(device), keys.flatten().to(device)
        self._valid = valid.flatten().nonzero().squeeze(1).to(device)
        # A padded query sees the first key rather than nothing, whose softmax would be NaN.
        visible[..., 0] |= ~valid
        mask = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)
        self._mask = mask.unsqueeze(1).to(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, kv_heads = q.shape[1], k.shape[1]
        rows = q.index_select(0, self._queries).view(*self._shape, heads, -1).transpose(1, 2)
        keys, values = (
            t.index_select(0, self._keys).view(*self._key_shape, kv_heads, -1).transpose(1, 2) for t in (k, v)
        )
        if kv_heads != heads:
            keys, values = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (keys, values))
        out = F.scaled_dot_product_attention(rows, keys, values, self._mask.to(q.dtype))
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self._valid)


def _padded(lengths: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Flat indices int64[S, longest] of consecutive segments that start at `offset`, and which are real."""
    starts = offset + lengths.cumsum(0) - lengths
    columns = torch.arange(int(lengths.max()))
    valid = columns < lengths.unsqueeze(1)
    return torch.where(valid, starts.unsqueeze(1) + columns, 0), valid


def _causal(valid: Tensor) -> Tensor:
    """bool[S, L, L]: query i of a segment sees its real keys up to i."""
    length = valid.shape[1]
    return valid.unsqueeze(1) & torch.ones(length, length, dtype=torch.bool).tril()
