"""The KV cache of a batch: one slot a sample, left-aligned, and the attention that reads it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from perilune.models.attention import PackedAttention, attend_one, padded
from perilune.models.config import DecoderConfig

_GAP = 64  # least elements between heads: memory is slow where many things lie a power of two apart


class Memory:
    """Buffers that are given back and taken again: the first touch of fresh memory is slow.

    What they hold is arbitrary but finite, as long as nothing else was written to them.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._free: list[Tensor] = []

    def take(self, elements: int) -> Tensor:
        """A buffer of at least that many elements."""
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= elements:
                return self._free.pop(index)
        self._free.clear()  # all too small
        return torch.zeros(elements, device=self._device, dtype=self._dtype)

    def give(self, buffer: Tensor) -> None:
        """Let `buffer` be taken again."""
        self._free.append(buffer)


class KVCache:
    """Keys and values of up to `slots` samples.

    It is hardly longer than the longest sample, and laid out anew when that grows: products read what lies
    close together several times as fast.

    Attributes:
        keys: [layers, slots, KV, D, capacity]; a key is a column, because products read them that way.
        values: [layers, slots, KV, capacity, D].
    """

    def __init__(self, config: DecoderConfig, slots: int, memory: Memory) -> None:
        self.config, self.slots = config, slots
        self._memory = memory
        self._lay_out(0)

    def _lay_out(self, capacity: int) -> None:
        heads, size = self.config.num_kv_heads, self.config.head_dim
        self.capacity, self._stride = capacity, capacity + -(-_GAP // size)
        shape = (2, self.config.num_layers, self.slots, heads, self._stride, size)
        self._buffer = self._memory.take(math.prod(shape))
        keys, values = self._buffer[: math.prod(shape)].view(shape).unbind()
        self.keys = keys.flatten(-2)[..., : capacity * size].view(*shape[1:-2], size, capacity)
        self.values = values[..., :capacity, :]
        self._value_rows = values.flatten(1, 3)

    def reserve(self, length: int, used: int) -> None:
        """Make room for `length` tokens a slot; only the first `used` slots are kept."""
        if length <= self.capacity:
            return
        held, keys, values, buffer = self.capacity, self.keys, self.values, self._buffer
        self._lay_out(padded(max(length, held + held // 8)))
        self.keys[:, :used, ..., :held] = keys[:, :used]
        self.values[:, :used, :, :held] = values[:, :used]
        self._memory.give(buffer)

    def release(self) -> None:
        """Give its memory back; the cache is not used again."""
        self._memory.give(self._buffer)

    def places(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where `store` puts tokens at int64[B] positions of the first B slots, until the next `reserve`."""
        slots = torch.arange(positions.shape[0], device=positions.device)
        heads = torch.arange(self.config.num_kv_heads, device=positions.device)
        rows = (slots[:, None] * len(heads) + heads) * self._stride + positions[:, None]
        return slots, positions, rows.flatten()

    def store(self, layer: int, places: tuple[Tensor, Tensor, Tensor], k: Tensor, v: Tensor) -> None:
        """Keep float[B, KV, D] keys and values, one token of each of the first B slots."""
        slots, positions, rows = places
        self.keys[layer][slots, :, :, positions] = k
        self._value_rows[layer].index_copy_(0, rows, v.reshape(-1, v.shape[-1]))

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first `length` tokens of slots int64[M] `sources` over slots int64[M] `targets`."""
        self.keys[:, targets, :, :, :length] = self.keys[:, sources, :, :, :length]
        self.values[:, targets, :, :length] = self.values[:, sources, :, :length]


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

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        self._cache.keys[layer, self._slots, :, :, : self._length] = k[self._tokens].permute(0, 2, 3, 1)
        self._cache.values[layer, self._slots, :, : self._length] = v[self._tokens].transpose(1, 2)
        return self._packed(layer, q, k, v, window)


class Decode:
    """Attention of one new token in each of the first B slots, which it also stores.

    Args:
        positions: int64[B], where the new tokens stand in their sequences.
        longest: the largest position + 1.
    """

    def __init__(self, cache: KVCache, positions: Tensor, longest: int) -> None:
        self._cache, self._positions = cache, positions
        count = positions.shape[0]
        self._places = cache.places(positions)
        self._columns = torch.arange(padded(longest), device=positions.device)
        self._masks: dict[int | None, Tensor] = {}
        self._keys = cache.keys[:, :count, :, :, : len(self._columns)].transpose(-1, -2).flatten(1, 2)
        self._values = cache.values[:, :count, :, : len(self._columns)].flatten(1, 2)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        self._cache.store(layer, self._places, k, v)
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        return attend_one(q, self._keys[layer], self._values[layer], self._masks[window])

    def _mask(self, window: int | None) -> Tensor:
        """float[B * KV, 1, T] of layers with that window."""
        at = self._positions[:, None]
        unseen = self._columns > at
        if window is not None:
            unseen |= self._columns <= at - window
        mask = torch.zeros(unseen.shape, device=at.device, dtype=self._cache.keys.dtype)
        mask = mask.masked_fill_(unseen, -torch.inf)
        return mask.repeat_interleave(self._cache.keys.shape[2], dim=0)[:, None]
