"""The paged KV cache: keys, values and states of all layers, in blocks of 16 tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.blocks import BLOCK, NULL_BLOCK, Blocks
from perilune.engine.routes import RouteRecorder, RouteStore
from perilune.engine.step import StepBatch
from perilune.errors import RequestError
from perilune.models.config.decoder_config import DecoderConfig


class PagedCache:
    """Keys and values of every layer, in blocks of 16 tokens.

    Args:
        num_blocks: blocks for each of the model's `distinct_windows`, including the null block.

    Attributes:
        keys: [blocks, KV, D, 16] for each layer; a key is a column, because products read columns.
        values: [blocks, KV, 16, D] for each layer; empty in latent attention.
        rank: in latent attention, the number of elements at the beginning of a key that are also the value;
            otherwise 0.
        key_scales, value_scales: float32[blocks, KV, 16] for each layer of an int8 cache, with one scale per
            token and head; otherwise empty.
        states: float32[blocks, H, Dk, Dv] for each layer of linear attention (`engine.recurrence`), the state
            of each of H heads; empty for other layers. Layers of linear attention have no keys and values.
        tails: float32[blocks, K - 1, C] for each layer of linear attention, the last inputs of its short
            convolution over K tokens and C channels; empty for other layers.
        state_table: index of the block table of the layers of linear attention; -1 without such layers.
        table_of: index of the block table of each layer, which is the index of its window.
        routes: the experts of each token, if they are recorded.
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = tuple(num_blocks)
        self.heads, self.size = config.cached_heads
        self.rank = 0 if config.latent is None else config.latent.rank
        self.dtype, self.device = dtype, torch.device(device)
        windows = [config.window(layer) for layer in range(config.num_layers)]
        self.table_of = tuple(config.distinct_windows.index(window) for window in windows)
        self._parts: list[Tensor] = []
        linear = [layer for layer in range(config.num_layers) if config.is_linear(layer)]
        attending = [layer for layer in range(config.num_layers) if layer not in linear]
        self.keys = self._allocate((self.heads, self.size, BLOCK), dtype, attending)
        with_values = [] if self.rank else attending
        self.values = self._allocate((self.heads, BLOCK, self.size), dtype, with_values)
        narrow, scales = dtype == torch.int8, ((self.heads, BLOCK), torch.float32)
        self.key_scales = self._allocate(*scales, attending if narrow else [])
        self.value_scales = self._allocate(*scales, with_values if narrow else [])
        self.states: list[Tensor] = []
        self.tails: list[Tensor] = []
        self.state_table = -1
        if config.delta is not None and linear:
            delta = config.delta
            self.state_table = self.table_of[linear[0]]
            state = delta.heads, delta.key_size, delta.value_size
            self.states = self._allocate(state, torch.float32, linear)
            self.tails = self._allocate((delta.taps - 1, delta.channels), torch.float32, linear)
        self.routes: RouteStore | None = None

    def record_routes(self, config: DecoderConfig) -> RouteStore:
        """Record the routes of a mixture of experts from now on, and return their store.

        Raises:
            RequestError: for a dense model.
        """
        self.routes = RouteStore(config, self.num_blocks, self.device)
        return self.routes

    def make_recorder(self, tables: Sequence[Tensor], offsets: Tensor) -> RouteRecorder | None:
        """Return a recorder for N tokens, or None if routes are not recorded.

        Args:
            tables: for each window, the block int64[N] of each token.
            offsets: int64[N], the offset of each token in its block.
        """
        if self.routes is None:
            return None
        return RouteRecorder(self.routes, tables[self.routes.table] * BLOCK + offsets)

    def store(self, layer: int, slots: CacheSlots, k: Tensor, v: Tensor) -> None:
        """Store keys float[N, KV, D] and values float[N, KV, E]."""
        if self.dtype == torch.int8:
            k, self.key_scales[layer][slots.blocks, :, slots.offsets] = _quantize(k)
        self.keys[layer][slots.blocks, :, :, slots.offsets] = k.to(self.dtype)
        if self.rank:
            return
        if self.dtype == torch.int8:
            v, self.value_scales[layer][slots.blocks, :, slots.offsets] = _quantize(v)
        self.values[layer].view(-1, self.size).index_copy_(
            0, slots.value_rows, v.reshape(-1, self.size).to(self.dtype)
        )

    def gather(self, layer: int, table: GatherIndices) -> tuple[Tensor, Tensor]:
        """Return keys float[S * KV, T, D] and values [..., E] in the order of positions."""
        keys = self.keys[layer].view(-1, BLOCK).index_select(0, table.key_rows)
        keys = keys.view(-1, self.size, table.columns).transpose(1, 2)
        if self.dtype == torch.int8:
            keys = keys * self._scales(self.key_scales[layer], table)
        if self.rank:
            return keys, keys[..., : self.rank]
        values = self.values[layer].view(-1, BLOCK * self.size).index_select(0, table.value_blocks)
        values = values.view(-1, table.columns, self.size)
        if self.dtype == torch.int8:
            values = values * self._scales(self.value_scales[layer], table)
        return keys, values

    def _scales(self, scales: Tensor, table: GatherIndices) -> Tensor:
        """Return float32[S * KV, T, 1] from float32[blocks, KV, 16]."""
        return scales.view(-1, BLOCK)[table.value_blocks].view(-1, table.columns, 1)

    def copy(self, sources: Blocks, targets: Blocks) -> None:
        """Copy blocks int32[W, C] over other blocks, in all layers of each window."""
        source, target = (torch.from_numpy(x).long().to(self.device) for x in (sources, targets))
        tables = cycle(range(len(self.num_blocks)))
        for part, table in zip(self._parts, tables, strict=False):
            part[:, target[table]] = part[:, source[table]]
        if self.routes is not None:
            self.routes.copy(source, target)

    def read(self, index: int, blocks: Blocks) -> NDArray[np.uint8]:
        """Return the content uint8[C, bytes] of the blocks int32[C] of window `index`."""
        block_ids = torch.from_numpy(blocks).long().to(self.device)
        parts = (part[:, block_ids].transpose(0, 1) for part in self._window_parts(index))
        as_bytes = [part.contiguous().view(len(part), -1).view(torch.uint8) for part in parts]
        return torch.cat(as_bytes, dim=1).cpu().numpy()

    def write(self, index: int, blocks: Blocks, content: NDArray[np.uint8]) -> None:
        """Overwrite the blocks int32[C] of window `index` with the content that `read` returned."""
        block_ids = torch.from_numpy(blocks).long().to(self.device)
        data, start = torch.from_numpy(content).to(self.device), 0
        for part in self._window_parts(index):
            shape = len(blocks), part.shape[0], *part.shape[2:]
            size = math.prod(shape[1:]) * part.dtype.itemsize
            part[:, block_ids] = (
                data[:, start : start + size].contiguous().view(part.dtype).view(shape).transpose(0, 1)
            )
            start += size

    def _window_parts(self, index: int) -> list[Tensor]:
        """Return all tensors [layers, blocks, ...] that belong to window `index`."""
        parts = [part for part in self._parts[index :: len(self.num_blocks)] if len(part)]
        if self.routes is not None and self.routes.table == index:
            return [*parts, self.routes.experts[None]]
        return parts

    def clear(self) -> None:
        """Set everything to zero. Non-finite values left by a failure would spoil masked products."""
        for part in self._parts:
            part.zero_()
        if self.routes is not None:
            self.routes.clear()

    @property
    def nbytes(self) -> int:
        """Size of all blocks in bytes, used or not, without routes."""
        return sum(part.nbytes for part in self._parts)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, layers: Sequence[int]) -> list[Tensor]:
        """Allocate zeros [blocks, *shape] for each of `layers`, in one tensor per table; empty for others."""
        if not layers:
            return []
        tables = [self.table_of[layer] for layer in layers]
        by_table = [
            _zeros((tables.count(table), blocks, *shape), dtype, self.device)
            for table, blocks in enumerate(self.num_blocks)
        ]
        self._parts += by_table
        of_table = [iter(part) for part in by_table]
        of_layer = {layer: next(of_table[self.table_of[layer]]) for layer in layers}
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return [of_layer.get(layer, empty) for layer in range(len(self.table_of))]


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize float[N, KV, D] to integers from -127 to 127; also return the scales float32[N, KV]."""
    top = x.float().abs().amax(-1).clamp(min=1e-30)
    return (x / top[..., None] * 127).round(), top / 127


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU, memory is allocated on first use, whereas `torch.zeros` would write it.

    Raises:
        RequestError: when there is not enough memory.
    """
    size = math.prod(shape) * dtype.itemsize
    try:
        if device.type != "cpu" or not size:
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise RequestError(
            f"not enough memory for {size / (1 << 30):.1f} GiB of keys or values: {error}",
            where=f"the engine's cache on {device}",
            remedy="make the cache smaller, or request shorter answers (max_tokens) or fewer samples at once",
        ) from None


class CacheSlots:
    """The cache slots of the tokens of a step.

    Args:
        blocks, offsets: int64[N], the block of each token and its offset there, on the device of the cache.
        heads: number of key-value heads KV.
    """

    def __init__(self, blocks: Tensor, offsets: Tensor, heads: int) -> None:
        per_head = blocks[:, None] * heads + torch.arange(heads, device=blocks.device)
        self.blocks, self.offsets = blocks, offsets
        self.value_rows = (per_head * BLOCK + offsets[:, None]).reshape(-1)


class GatherIndices:
    """Indices to gather the blocks int64[S, B] of S sequences from the cache, for all key-value heads.

    Args:
        heads, size: number of key-value heads, and elements of a key.

    Attributes:
        columns: number of positions T of each sequence, padding included.
        key_rows: int64[S * KV * D * B], rows of the cache's keys as [blocks * KV * D, 16].
        value_blocks: int64[S * KV * B], rows of the cache's values as [blocks * KV, 16 * D].
    """

    def __init__(self, blocks: Tensor, heads: int, size: int) -> None:
        head, element = (torch.arange(count, device=blocks.device)[:, None] for count in (heads, size))
        per_head = blocks[:, None, :] * heads + head  # [S, KV, B]
        rows = per_head[:, :, None, :] * size + element  # [S, KV, D, B]
        self.columns = blocks.shape[1] * BLOCK
        self.key_rows, self.value_blocks = rows.reshape(-1), per_head.reshape(-1)


def slot_mapping(batch: StepBatch, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the block int64[W, N] and offset int64[N] of each token of a batch.

    The batch is padded to N = `tokens` tokens, whose slots are in the null block.
    """
    fed = len(batch.token_ids)
    shape = (len(batch.block_tables), tokens)
    blocks, offsets = np.full(shape, NULL_BLOCK, dtype=np.int64), np.zeros(tokens, dtype=np.int64)
    column, offsets[:fed] = np.divmod(batch.positions, BLOCK)
    blocks[:, :fed] = batch.block_tables[:, batch.sequence_of, column]
    return torch.from_numpy(blocks).to(device), torch.from_numpy(offsets).to(device)
