"""The attention of one step over the paged cache, in torch.

Before each product, blocks are copied into the order of positions. With this layout, a query has the same
bits as when its whole sequence is computed at once (see `models/attention.py`).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.blocks import BLOCK
from perilune.engine.cache import CacheSlots, GatherIndices, PagedCache, slot_mapping
from perilune.engine.step import StepBatch
from perilune.models.attention import AttentionLayer, attend

_ALIGNMENT = 192 // BLOCK  # keys before a window are skipped in multiples of so many blocks (see `attend`)
_MAX_QUERIES = 512  # maximum number of queries of one sequence in a product
_MAX_SCORES = 1 << 24  # attention scores in memory at a time


@dataclass(slots=True, eq=False)
class _QueryGroup:
    """Queries of S sequences that are computed together, M per sequence.

    Attributes:
        tokens: int64[S, M], indices of the tokens in the batch.
        positions: int64[S, M], their positions.
        tables: int64[W, S, B], the block tables.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    tables: NDArray[np.int64]


class PagedAttention:
    """An `Attention` for the decoder: it stores keys and values of the tokens of one step, then attends.

    Args:
        batch: the batch of the step.
        tokens: number of tokens that the decoder computes: those of the batch, and padding after them.
    """

    def __init__(self, cache: PagedCache, batch: StepBatch, tokens: int) -> None:
        self._cache = cache
        blocks, offsets = slot_mapping(batch, tokens, cache.device)
        self._slots = [CacheSlots(of_table, offsets, cache.heads) for of_table in blocks]
        self._query_groups = list(_group_queries(batch))
        self._groups: dict[int | None, list[_GroupAttention]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        cache, window = self._cache, layer.window
        table = cache.table_of[layer.index]
        cache.store(layer.index, self._slots[table], k, v)
        if window not in self._groups:
            self._groups[window] = [_GroupAttention(x, table, window, cache, q) for x in self._query_groups]
        out = q.new_zeros(*q.shape[:2], v.shape[-1])
        for part in self._groups[window]:
            out.index_copy_(0, part.tokens, part(q, cache, layer))
        return out


class _GroupAttention:
    """Attention of some queries in the layers with one window size.

    Attributes:
        tokens: int64[S * M], the rows of the queries in the batch.
    """

    def __init__(
        self, queries: _QueryGroup, table: int, window: int | None, cache: PagedCache, q: Tensor
    ) -> None:
        sequences, count = queries.positions.shape
        heads, size, group = cache.heads, cache.size, q.shape[1] // cache.heads
        first = 0
        if window is not None:
            first = max(0, int(queries.positions.min()) - window + 1) // BLOCK // _ALIGNMENT * _ALIGNMENT
        last = int(queries.positions.max()) // BLOCK + 1
        self._shape = sequences, heads, group, count, size
        blocks = torch.from_numpy(queries.tables[table, :, first:last]).to(q.device)
        self._table = GatherIndices(blocks, heads, size)
        self._mask = self._make_mask(queries.positions, first * BLOCK, window, q)
        self.tokens = torch.from_numpy(queries.tokens.ravel()).to(q.device)

    def __call__(self, q: Tensor, cache: PagedCache, layer: AttentionLayer) -> Tensor:
        """Return the attention outputs float[S * M, H, E]."""
        sequences, heads, group, count, size = self._shape
        q = q.index_select(0, self.tokens)
        if count > 1:
            q = q.view(sequences, count, heads * group, size).transpose(1, 2)
        keys, values = cache.gather(layer.index, self._table)
        out = attend(
            q.reshape(sequences * heads, group * count, size),
            keys.to(q.dtype),
            values.to(q.dtype),
            self._mask,
            None if layer.options is None else layer.options.for_sets(sequences * heads, heads, count),
        )
        if count > 1:
            out = out.reshape(sequences, heads * group, count, -1).transpose(1, 2)
        return out.reshape(-1, heads * group, values.shape[-1])

    def _make_mask(self, positions: NDArray[np.int64], start: int, window: int | None, q: Tensor) -> Tensor:
        """Return a mask broadcastable to [S * KV, G * M, T]: 0 where a query sees a key, otherwise -inf."""
        sequences, heads, group, count, _ = self._shape
        if (positions == positions[:1]).all():
            positions, sequences, heads = positions[:1], 1, 1
        at = torch.from_numpy(positions).to(q.device)[:, :, None]
        mask = causal_mask(at, torch.arange(start, start + self._table.columns, device=q.device), window, q)
        if count == 1:
            return mask if heads == 1 else mask.repeat_interleave(heads, dim=0)
        mask = mask[:, None, None].expand(sequences, heads, group, -1, -1)
        return mask.reshape(sequences * heads, group * count, -1)


def causal_mask(at: Tensor, columns: Tensor, window: int | None, like: Tensor) -> Tensor:
    """Return a mask: 0 where a query at position `at` sees the key of a column, otherwise -inf.

    The shapes of `at` and `columns` are broadcast. Dtype and device are those of `like`.
    """
    unseen = columns > at
    if window is not None:
        unseen |= columns <= at - window
    return like.new_zeros(unseen.shape).masked_fill_(unseen, -torch.inf)


def _group_queries(batch: StepBatch) -> Iterator[_QueryGroup]:
    """Yield groups of queries with similar numbers of keys, so that little padding is computed."""
    blocks = batch.positions // BLOCK + 1
    decodes = batch.decodes
    if decodes:
        buckets = _bucket_size(blocks[:decodes])
        for size in np.unique(buckets):
            rows = np.flatnonzero(buckets == size)
            tables = batch.block_tables[:, rows, : int(blocks[rows].max())]
            yield _QueryGroup(rows[:, None], batch.positions[rows, None], tables.astype(np.int64))

    pieces: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for sequence, (start, end) in enumerate(
        zip(batch.cu_seqlens[decodes:-1].tolist(), batch.cu_seqlens[decodes + 1 :].tolist(), strict=True),
        decodes,
    ):
        for begin in range(start, end, _MAX_QUERIES):
            stop = min(begin + _MAX_QUERIES, end)
            shape = int(_bucket_size(np.array(stop - begin))), int(_bucket_size(blocks[stop - 1]))
            pieces[shape].append((sequence, begin, stop))
    for (count, columns), similar in sorted(pieces.items()):
        step = max(1, _MAX_SCORES // (count * columns * BLOCK))
        for start in range(0, len(similar), step):
            yield _pad_queries(batch, similar[start : start + step])


def _pad_queries(batch: StepBatch, pieces: Sequence[tuple[int, int, int]]) -> _QueryGroup:
    """Return the queries of `pieces`: (sequence, begin, stop) for tokens begin .. stop - 1.

    Shorter pieces are padded to the longest by repeating the last token.
    """
    sequences, begins, stops = np.array(pieces).T
    tokens = begins[:, None] + np.arange(int((stops - begins).max()))
    tokens = np.minimum(tokens, stops[:, None] - 1)
    positions = batch.positions[tokens]
    tables = batch.block_tables[:, sequences, : int(positions.max()) // BLOCK + 1]
    return _QueryGroup(tokens, positions, tables.astype(np.int64))


def _bucket_size(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the next power of two, at least 8."""
    bucket: NDArray[np.int64] = np.maximum(8, 1 << np.ceil(np.log2(sizes)).astype(np.int64))
    return bucket
