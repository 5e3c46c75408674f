"""Attention of decoding steps in torch, for tests of `GraphRunner` on a CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from perilune.engine.blocks import BLOCK
from perilune.engine.cache import CacheSlots, GatherIndices, PagedCache
from perilune.engine.paged_attention import causal_mask
from perilune.models.attention import AttentionLayer, attend


class GatheredAttention:
    """A `DecodeAttention` in torch that gathers the blocks into the order of positions."""

    def __init__(self, cache: PagedCache, tables: Sequence[Tensor], positions: Tensor) -> None:
        self._cache, self._positions = cache, positions.long()
        blocks = [table.long() for table in tables]
        column, within = (self._positions // BLOCK)[:, None], self._positions % BLOCK
        self._places = [CacheSlots(of.gather(1, column)[:, 0], within, cache.heads) for of in blocks]
        self._tables = [GatherIndices(of, cache.heads, cache.size) for of in blocks]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        cache, table = self._cache, self._cache.table_of[layer.index]
        cache.store(layer.index, self._places[table], k, v)
        keys, values = cache.gather(layer.index, self._tables[table])
        groups = q.reshape(len(keys), -1, cache.size)
        options = None if layer.options is None else layer.options.for_sets(len(keys), cache.heads, 1)
        mask = self._mask(q, layer.window)
        return attend(groups, keys.to(q.dtype), values.to(q.dtype), mask, options).reshape(q.shape)

    def _mask(self, q: Tensor, window: int | None) -> Tensor:
        """Return a mask [R * KV, 1, T]: 0 where a query sees a key, otherwise -inf."""
        columns = torch.arange(self._tables[0].columns, device=q.device)
        mask = causal_mask(self._positions[:, None], columns, window, q)
        return mask.repeat_interleave(self._cache.heads, dim=0)[:, None]
