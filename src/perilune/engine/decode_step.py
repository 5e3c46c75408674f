"""A decoding step that a CUDA graph can capture: one token per sample, with inputs in fixed buffers.

A CUDA graph records kernels with their addresses. The inputs of a step, including padded rows, are therefore
copied into buffers of a fixed shape, and everything else runs on the device. The step also runs without a
graph and without a GPU.

W distinct windows of the model, R rows, B columns of a block table.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from perilune.engine.blocks import BLOCK
from perilune.engine.cache import CacheSlots, GatherIndices, PagedCache
from perilune.engine.paged_attention import PagedAttention, causal_mask
from perilune.engine.step import StepBatch
from perilune.errors import RequestError
from perilune.models.attention import Attention, AttentionLayer, attend
from perilune.models.decoder import Decoder

DecodeAttention = Callable[[PagedCache, Sequence[Tensor], Tensor], Attention]
"""Creates the attention of one token per sequence over a cache, which also stores the token. Arguments: the
cache, W block tables int32[R, B] (rows may be strided) and positions int32[R], on the device of the cache."""


class GatheredAttention:
    """A `DecodeAttention` in torch that gathers the blocks into the order of positions."""

    def __init__(self, cache: PagedCache, tables: Sequence[Tensor], positions: Tensor) -> None:
        self._cache, self._positions = cache, positions.long()
        blocks = [table.long() for table in tables]
        column, offsets = (self._positions // BLOCK)[:, None], self._positions % BLOCK
        self._slots = [CacheSlots(x.gather(1, column)[:, 0], offsets, cache.heads) for x in blocks]
        self._tables = [GatherIndices(x, cache.heads, cache.size) for x in blocks]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        cache, table = self._cache, self._cache.table_of[layer.index]
        cache.store(layer.index, self._slots[table], k, v)
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


class TritonAttention:
    """A `DecodeAttention` with Triton kernels, which read the blocks in place."""

    def __init__(self, cache: PagedCache, tables: Sequence[Tensor], positions: Tensor) -> None:
        from perilune.models import triton_attention as kernels

        scales = cache.key_scales, cache.value_scales
        self._kernels, self._table_of = kernels, cache.table_of
        self._layers = [
            kernels.LayerCache(*parts, *(x[layer] if x else None for x in scales))
            for layer, parts in enumerate(zip(cache.keys, cache.values, strict=True))
        ]
        self._tables, self._positions = tables, positions

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        if layer.options is not None:
            raise RequestError("the Triton kernels support neither attention sinks nor capped scores")
        table = self._tables[self._table_of[layer.index]]
        cached = self._layers[layer.index], table, self._positions
        self._kernels.store(k, v, *cached)
        return self._kernels.attend(q, *cached, layer.window)


class MixedAttention:
    """Attention of a step with decoding samples and samples in prefill.

    Decoding samples use the same attention as in a step without prefill. Samples in prefill use
    `PagedAttention`.
    """

    def __init__(self, cache: PagedCache, batch: StepBatch, tokens: int, decoding: DecodeAttention) -> None:
        self._decodes = count = batch.decodes
        tables, positions = (
            torch.from_numpy(array).to(cache.device)
            for array in (batch.block_tables[:, :count], batch.positions[:count].astype("int32"))
        )
        self._decoding = decoding(cache, list(tables), positions)
        rest = StepBatch(
            token_ids=batch.token_ids[count:],
            positions=batch.positions[count:],
            cu_seqlens=batch.cu_seqlens[count:] - count,
            decodes=0,
            block_tables=batch.block_tables[:, count:],
            logit_rows=batch.logit_rows,
        )
        self._rest = PagedAttention(cache, rest, tokens - count)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        count = self._decodes
        decoded = self._decoding(q[:count], k[:count], v[:count], layer)
        return torch.cat([decoded, self._rest(q[count:], k[count:], v[count:], layer)])


class DecodeStep:
    """The decoding step of up to R samples with up to B columns in their block tables.

    Args:
        shape: (R, B).
        graphs: handle of the memory pool that captured graphs share; None to capture no graph.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedCache,
        shape: tuple[int, int],
        attention: DecodeAttention,
        graphs: Any = None,
    ) -> None:
        self._decoder, self._cache, self._attention, self._graphs = decoder, cache, attention, graphs
        self._rows, self._columns = shape
        self._graph: torch.cuda.CUDAGraph | None = None
        # One row per sample: token, position, and blocks for each window.
        width = 2 + len(cache.num_blocks) * self._columns
        self._inputs = torch.zeros(self._rows, width, dtype=torch.int32, device=cache.device)
        self._hidden: Tensor | None = None

    def __call__(self, batch: StepBatch) -> Tensor:
        """Return the last hidden states float[S, d] of a batch that only decodes.

        The next call may overwrite the result.
        """
        self._copy_inputs(batch)
        if self._graph is None:
            # The first call runs without a graph, which compiles the kernels to capture.
            hidden = self._compute()
            if self._graphs is not None:
                self._capture(self._graphs)
        else:
            self._graph.replay()
            assert self._hidden is not None
            hidden = self._hidden
        return hidden[: len(batch.token_ids)]

    def _copy_inputs(self, batch: StepBatch) -> None:
        """Copy the batch into the buffers. Rows without a sample write token 0 into the null block."""
        on_gpu = self._inputs.device.type == "cuda"
        # The allocator does not reuse pinned memory before the copy has read it.
        staged = torch.zeros(self._inputs.shape, dtype=torch.int32, pin_memory=on_gpu)
        count, columns = batch.block_tables.shape[1:]
        rows = staged[:count].numpy()
        rows[:, 0], rows[:, 1] = batch.token_ids, batch.positions
        for table, blocks in enumerate(batch.block_tables):
            start = 2 + table * self._columns
            rows[:, start : start + columns] = blocks
        self._inputs.copy_(staged, non_blocking=on_gpu)

    def _compute(self) -> Tensor:
        """Compute hidden states float[R, d] from the buffers."""
        tokens, positions = self._inputs[:, 0], self._inputs[:, 1]
        tables = torch.split(self._inputs[:, 2:], self._columns, dim=1)
        attention = self._attention(self._cache, tables, positions)
        columns, offsets = (positions // BLOCK).long()[:, None], positions % BLOCK
        blocks = [table.gather(1, columns)[:, 0].long() for table in tables] if self._cache.routes else []
        recorder = self._cache.make_recorder(blocks, offsets)
        hidden: Tensor = self._decoder(tokens.long(), positions.long(), attention, recorder)
        return hidden

    def _capture(self, graphs: Any) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads of a server may use the device during the capture.
        with torch.cuda.graph(graph, pool=graphs, capture_error_mode="thread_local"):
            self._hidden = self._compute()
        self._graph = graph
