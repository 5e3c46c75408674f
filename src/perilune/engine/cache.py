"""The paged KV cache, and the attention of one step over it.

Blocks are gathered into the order of positions before each product. That costs a copy, and buys that a query
meets its keys exactly as it does when its whole sequence is computed at once: see `models/attention.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.blocks import BLOCK, NULL_BLOCK, Blocks
from perilune.engine.step import StepBatch
from perilune.errors import RequestError
from perilune.models.attention import attend
from perilune.models.config.decoder_config import DecoderConfig

_CUT = 192 // BLOCK  # blocks: keys behind a window are left out in these multiples (see `attend`)
_QUERIES = 512  # most queries of a sequence in one product
_SCORES = 1 << 24  # most attention scores held at a time


class PagedCache:
    """Keys and values of every layer, in blocks of 16 tokens; by layer, since windows differ in their blocks.

    Args:
        num_blocks: for each of the model's `distinct_windows`, the null block included.

    Attributes:
        keys: of each layer [blocks, KV, D, 16]; a key is a column, because products read them that way.
        values: of each layer [blocks, KV, 16, D].
        key_scales, value_scales: of each layer float32[blocks, KV, 16] in a cache of int8, whose elements
            are integer * scale of the token and head; otherwise empty.
        table_of: of each layer, which block table it goes by: the index of its window.
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = tuple(num_blocks)
        self.heads, self.size = config.num_kv_heads, config.head_dim
        self.dtype, self.device = dtype, torch.device(device)
        windows = [config.window(layer) for layer in range(config.num_layers)]
        self.table_of = tuple(config.distinct_windows.index(window) for window in windows)
        self.keys, self._keys_by_table = self._make((self.size, BLOCK), dtype)
        self.values, self._values_by_table = self._make((BLOCK, self.size), dtype)
        self._parts = [*self._keys_by_table, *self._values_by_table]
        self.key_scales: list[Tensor] = []
        self.value_scales: list[Tensor] = []
        if dtype == torch.int8:
            self.key_scales, its_keys = self._make((BLOCK,), torch.float32)
            self.value_scales, its_values = self._make((BLOCK,), torch.float32)
            self._parts += [*its_keys, *its_values]

    def store(self, layer: int, places: Places, k: Tensor, v: Tensor) -> None:
        """Keep float[N, KV, D] keys and values."""
        if self.dtype == torch.int8:
            k, self.key_scales[layer][places.blocks, :, places.offsets] = _in_steps(k)
            v, self.value_scales[layer][places.blocks, :, places.offsets] = _in_steps(v)
        self.keys[layer][places.blocks, :, :, places.offsets] = k.to(self.dtype)
        self.values[layer].view(-1, self.size).index_copy_(
            0, places.value_rows, v.reshape(-1, self.size).to(self.dtype)
        )

    def gather(self, layer: int, table: Table) -> tuple[Tensor, Tensor]:
        """Keys and values float[S * KV, T, D] in the order of positions."""
        keys = self.keys[layer].view(-1, BLOCK).index_select(0, table.key_rows)
        values = self.values[layer].view(-1, BLOCK * self.size).index_select(0, table.value_blocks)
        keys = keys.view(-1, self.size, table.columns).transpose(1, 2)
        values = values.view(-1, table.columns, self.size)
        if self.dtype != torch.int8:
            return keys, values
        scales = (
            of[layer].view(-1, BLOCK)[table.value_blocks] for of in (self.key_scales, self.value_scales)
        )
        of_keys, of_values = (of.view(-1, table.columns, 1) for of in scales)
        return keys * of_keys, values * of_values

    def copy(self, sources: Blocks, targets: Blocks) -> None:
        """Copy blocks int32[W, C], in all layers of each window, over others."""
        of, to = (torch.from_numpy(x).long().to(self.device) for x in (sources, targets))
        tables = cycle(range(len(self.num_blocks)))
        for part, table in zip(self._parts, tables, strict=False):
            part[:, to[table]] = part[:, of[table]]

    def clear(self) -> None:
        """Forget everything; what a failure left may not be finite, and would spoil what is masked."""
        for part in self._parts:
            part.zero_()

    @property
    def nbytes(self) -> int:
        """Of all blocks, used or not."""
        return sum(part.nbytes for part in self._parts)

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """Zeros [blocks, KV, *shape] of each layer, and the same [layers, blocks, ...] of each window."""
        by_table = [
            _zeros((self.table_of.count(table), blocks, self.heads, *shape), dtype, self.device)
            for table, blocks in enumerate(self.num_blocks)
        ]
        layers = [iter(part) for part in by_table]
        return [next(layers[table]) for table in self.table_of], by_table


def _in_steps(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of float[N, KV, D] the nearest integers in 127ths of each row's largest, and float32[N, KV] a 127th."""
    top = x.float().abs().amax(-1).clamp(min=1e-30)
    return (x / top[..., None] * 127).round(), top / 127


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Finite, and on a CPU without taking memory before it is used: torch would write the zeros.

    Raises:
        RequestError: when there is not as much memory.
    """
    size = math.prod(shape) * dtype.itemsize
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise RequestError(
            f"{size / (1 << 30):.1f} GiB for keys or values do not fit beside what is there: {error}",
            where=f"the engine's cache on {device}",
            remedy="make the cache smaller, ask for shorter answers (max_tokens) or fewer samples at once",
        ) from None


class Places:
    """Where the tokens of a step are stored.

    Args:
        blocks, offsets: int64[N], on the cache's device.
        heads: KV.
    """

    def __init__(self, blocks: Tensor, offsets: Tensor, heads: int) -> None:
        per_head = blocks[:, None] * heads + torch.arange(heads, device=blocks.device)
        self.blocks, self.offsets = blocks, offsets
        self.value_rows = (per_head * BLOCK + offsets[:, None]).reshape(-1)


class Table:
    """Where the blocks int64[S, B] of S sequences lie, for all heads; on the cache's device."""

    def __init__(self, blocks: Tensor, heads: int, size: int) -> None:
        head, element = (torch.arange(count, device=blocks.device)[:, None] for count in (heads, size))
        per_head = blocks[:, None, :] * heads + head  # [S, KV, B]
        rows = per_head[:, :, None, :] * size + element  # [S, KV, D, B]
        self.columns = blocks.shape[1] * BLOCK
        self.key_rows, self.value_blocks = rows.reshape(-1), per_head.reshape(-1)


@dataclass(slots=True, eq=False)
class _Queries:
    """Queries of S sequences that are computed together, M of each.

    Attributes:
        tokens: int64[S, M] places in the batch; None for the first S tokens with M = 1.
        positions: int64[S, M].
        tables: int64[W, S, B].
    """

    tokens: NDArray[np.int64] | None
    positions: NDArray[np.int64]
    tables: NDArray[np.int64]


class PagedAttention:
    """Attention of the tokens of one step, which it also stores. An `Attention` for the decoder.

    Args:
        batch: what the step computes.
        tokens: how many tokens the decoder computes: those of the batch, and padding after them.
    """

    def __init__(self, cache: PagedCache, batch: StepBatch, tokens: int) -> None:
        self._cache = cache
        fed = len(batch.token_ids)
        shape = (len(batch.block_tables), tokens)
        blocks, offsets = np.full(shape, NULL_BLOCK, dtype=np.int64), np.zeros(tokens, dtype=np.int64)
        column, offsets[:fed] = np.divmod(batch.positions, BLOCK)
        counts = np.diff(batch.cu_seqlens)
        sequence = np.arange(fed) if batch.decodes == fed else np.repeat(np.arange(len(counts)), counts)
        blocks[:, :fed] = batch.block_tables[:, sequence, column]
        at, within = (torch.from_numpy(x).to(cache.device) for x in (blocks, offsets))
        self._places = [Places(of_table, within, cache.heads) for of_table in at]
        self._queries = list(_in_groups(batch))
        self._parts: dict[int | None, list[_Part]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        table = self._cache.table_of[layer]
        self._cache.store(layer, self._places[table], k, v)
        if window not in self._parts:
            self._parts[window] = [_Part(of, table, window, self._cache, q) for of in self._queries]
        parts = self._parts[window]
        if len(parts) == 1 and parts[0].whole == len(q):
            return parts[0](layer, q, self._cache)
        out = torch.zeros_like(q)
        for part in parts:
            part.into(out, layer, q, self._cache)
        return out


class _Part:
    """Attention of some queries, of layers with the same window."""

    def __init__(
        self, queries: _Queries, table: int, window: int | None, cache: PagedCache, q: Tensor
    ) -> None:
        sequences, count = queries.positions.shape
        heads, size, group = cache.heads, cache.size, q.shape[1] // cache.heads
        first = 0
        if window is not None:
            first = max(0, int(queries.positions.min()) - window + 1) // BLOCK // _CUT * _CUT
        last = int(queries.positions.max()) // BLOCK + 1
        self._shape = sequences, heads, group, count, size
        blocks = torch.from_numpy(queries.tables[table, :, first:last]).to(q.device)
        self._table = Table(blocks, heads, size)
        self._mask = self._make_mask(queries.positions, first * BLOCK, window, q)
        self._tokens: Tensor | None = None
        self.whole = sequences if queries.tokens is None else -1
        if queries.tokens is not None:
            self._tokens = torch.from_numpy(queries.tokens.ravel()).to(q.device)

    def __call__(self, layer: int, q: Tensor, cache: PagedCache) -> Tensor:
        """float[S * M, H, D]."""
        sequences, heads, group, count, size = self._shape
        q = q[: self.whole] if self._tokens is None else q.index_select(0, self._tokens)
        if count > 1:
            q = q.view(sequences, count, heads * group, size).transpose(1, 2)
        keys, values = cache.gather(layer, self._table)
        out = attend(
            q.reshape(sequences * heads, group * count, size),
            keys.to(q.dtype),
            values.to(q.dtype),
            self._mask,
        )
        if count > 1:
            out = out.reshape(sequences, heads * group, count, size).transpose(1, 2)
        return out.reshape(-1, heads * group, size)

    def into(self, out: Tensor, layer: int, q: Tensor, cache: PagedCache) -> None:
        """Write the outputs where their tokens are."""
        if self._tokens is None:
            out[: self.whole] = self(layer, q, cache)
        else:
            out.index_copy_(0, self._tokens, self(layer, q, cache))

    def _make_mask(self, positions: NDArray[np.int64], start: int, window: int | None, q: Tensor) -> Tensor:
        """Broadcastable to [S * KV, G * M, T]: 0 on what a query sees, -inf elsewhere."""
        sequences, heads, group, count, _ = self._shape
        if (positions == positions[:1]).all():
            positions, sequences, heads = positions[:1], 1, 1
        at = torch.from_numpy(positions).to(q.device)[:, :, None]
        column = torch.arange(start, start + self._table.columns, device=q.device)
        unseen = column > at
        if window is not None:
            unseen |= column <= at - window
        mask = torch.zeros(unseen.shape, dtype=q.dtype, device=q.device).masked_fill_(unseen, -torch.inf)
        if count == 1:
            return mask if heads == 1 else mask.repeat_interleave(heads, dim=0)
        mask = mask[:, None, None].expand(sequences, heads, group, -1, -1)
        return mask.reshape(sequences * heads, group * count, -1)


def _in_groups(batch: StepBatch) -> Iterator[_Queries]:
    """Queries with about as many keys are computed together, so that little of it is for nothing."""
    blocks = batch.positions // BLOCK + 1
    decodes = batch.decodes
    if decodes:
        buckets = _bucket(blocks[:decodes])
        for size in np.unique(buckets):
            rows = np.flatnonzero(buckets == size)
            tokens = None if len(rows) == decodes else rows[:, None]
            tables = batch.block_tables[:, rows, : int(blocks[rows].max())]
            yield _Queries(tokens, batch.positions[rows, None], tables.astype(np.int64))

    pieces: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for sequence, (start, end) in enumerate(
        zip(batch.cu_seqlens[decodes:-1].tolist(), batch.cu_seqlens[decodes + 1 :].tolist(), strict=True),
        decodes,
    ):
        for begin in range(start, end, _QUERIES):
            stop = min(begin + _QUERIES, end)
            shape = int(_bucket(np.array(stop - begin))), int(_bucket(blocks[stop - 1]))
            pieces[shape].append((sequence, begin, stop))
    for (count, columns), alike in sorted(pieces.items()):
        most = max(1, _SCORES // (count * columns * BLOCK))
        for start in range(0, len(alike), most):
            yield _padded(batch, alike[start : start + most])


def _padded(batch: StepBatch, pieces: Sequence[tuple[int, int, int]]) -> _Queries:
    """Tokens begin .. stop - 1 of each sequence, the last repeated to make all as long as the longest."""
    sequences, begins, stops = np.array(pieces).T
    tokens = begins[:, None] + np.arange(int((stops - begins).max()))
    tokens = np.minimum(tokens, stops[:, None] - 1)
    positions = batch.positions[tokens]
    tables = batch.block_tables[:, sequences, : int(positions.max()) // BLOCK + 1]
    return _Queries(tokens, positions, tables.astype(np.int64))


def _bucket(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The next power of two, at least 8."""
    bucket: NDArray[np.int64] = np.maximum(8, 1 << np.ceil(np.log2(sizes)).astype(np.int64))
    return bucket
