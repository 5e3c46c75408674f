"""The KV cache of a batch: one slot a sample, left-aligned, and the attention that reads it."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.models.attention import PackedAttention, attend_one, padded
from perilune.models.config import DecoderConfig

_GROWTH = 64


class KVCache:
    """Keys and values of up to `slots` samples; grows along time as needed.

    Attributes:
        keys, values: [layers, slots, KV, capacity, D] in the model's dtype.
    """

    def __init__(self, config: DecoderConfig, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (config.num_layers, slots, config.num_kv_heads, 0, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens a slot."""
        held = self.keys.shape[3]
        if length <= held:
            return
        capacity = -(-max(length, held * 3 // 2) // _GROWTH) * _GROWTH
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros((*old.shape[:3], capacity, old.shape[4]))
            new[:, :, :, :held] = old
            setattr(self, name, new)

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first `length` tokens of slots int64[M] `sources` over slots int64[M] `targets`."""
        for tensor in (self.keys, self.values):
            tensor[:, targets, :, :length] = tensor[:, sources, :, :length]


class Prefill:
    """Attention over whole prompts that also stores each prompt's keys and values in its samples' slots.

    Args:
        cu_seqlens: int64[S + 1], bounds of the prompts in the flat tokens.
        prompt_of_slot: int64[M], which prompt each new slot continues.
        first_slot: the new slots are first_slot .. first_slot + M.
    """

    def __init__(self, cache: KVCache, cu_seqlens: Tensor, prompt_of_slot: Tensor, first_slot: int) -> None:
        self._cache = cache
        self._packed = PackedAttention(cu_seqlens)
        self._length = int(cu_seqlens.diff().max())
        column = torch.arange(self._length, device=cu_seqlens.device)
        flat = cu_seqlens[:-1][prompt_of_slot, None] + column
        self._tokens = flat.clamp(max=int(cu_seqlens[-1]) - 1)
        self._slots = slice(first_slot, first_slot + len(prompt_of_slot))
        cache.reserve(self._length)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for stored, new in ((self._cache.keys, k), (self._cache.values, v)):
            stored[layer, self._slots, :, : self._length] = new[self._tokens].transpose(1, 2)
        return self._packed(layer, q, k, v)


class Decode:
    """Attention of one new token in each of the first B slots, which it also stores.

    Args:
        positions: int64[B], where the new tokens stand in their sequences.
        longest: the largest position + 1.
    """

    def __init__(self, cache: KVCache, positions: Tensor, longest: int) -> None:
        columns = padded(longest)
        cache.reserve(columns)
        self._cache = cache
        self._positions = positions
        self._rows = torch.arange(len(positions), device=positions.device)
        self._held = (slice(len(positions)), slice(None), slice(columns))
        unseen = torch.arange(columns, device=positions.device) > positions[:, None]
        mask = torch.zeros(unseen.shape, device=positions.device, dtype=cache.keys.dtype)
        mask = mask.masked_fill_(unseen, -torch.inf)
        self._mask = mask.repeat_interleave(cache.keys.shape[2], dim=0)[:, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows, :, self._positions] = k
        values[self._rows, :, self._positions] = v
        return attend_one(q, keys[self._held], values[self._held], self._mask)
