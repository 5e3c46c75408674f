"""Recurrent layers (linear attention) over the paged cache.

A block of such a layer holds one state: the state after the last computed token of the block. In a partly
filled block, this is the current state of the sample. In a full block, it is a snapshot from which requests
with the same prefix continue. A token needs only the state after the previous token, like attention with a
window of two tokens. So block tables, forks, eviction and offloading work as for sliding windows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.blocks import BLOCK
from perilune.engine.cache import PagedCache
from perilune.engine.step import StepBatch
from perilune.models.attention import Attention, AttentionLayer
from perilune.models.recurrence import DeltaInputs, Pieces, convolve, scan


class PagedRecurrence:
    """A `Recurrence` of one step that reads and stores states in blocks.

    Args:
        tokens: number of tokens that the decoder computes: those of the batch, and padding after them.
    """

    def __init__(self, cache: PagedCache, batch: StepBatch, tokens: int) -> None:
        self._cache, self._padded = cache, tokens
        self._starts, self._lengths = batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens)
        tables, first = batch.block_tables[cache.state_table], batch.positions[self._starts]
        begins = np.where(first > 0, tables[np.arange(len(first)), np.maximum(first - 1, 0) // BLOCK], -1)
        self._fresh = self._tensor(np.flatnonzero(begins < 0))
        self._begins = self._tensor(np.maximum(begins, 0))
        pieces: list[tuple[int, int, int, int]] = []
        spans = zip(
            self._starts.tolist(), self._lengths.tolist(), first.tolist(), begins.tolist(), strict=True
        )
        for span, table in zip(spans, tables, strict=True):
            pieces += _split_into_blocks(*span, table)
        self._pieces = Pieces(torch.tensor(pieces, dtype=torch.int64), cache.device)
        starts, lengths, _, blocks = self._pieces.rows.T
        self._last, self._blocks = (starts + lengths - 1).to(cache.device), blocks.to(cache.device)
        self._taps: dict[int, Tensor] = {}

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        cache, width = self._cache.tails[layer], weight.shape[1]
        if width not in self._taps:
            self._taps[width] = self._tensor(self._make_taps(width))
        taps = self._taps[width]
        tails = cache[self._begins].to(x.dtype)
        tails[self._fresh] = 0
        before = tails.flatten(0, 1)
        last = taps[self._last, 1:]
        stored = torch.where(
            (last < len(x))[..., None], x[last.clamp(max=len(x) - 1)], before[(last - len(x)).clamp(min=0)]
        )
        cache[self._blocks] = stored.to(cache.dtype)
        return convolve(x, before, taps, weight)

    def _make_taps(self, width: int) -> NDArray[np.int64]:
        """Return the K inputs int64[N, K] of each token: rows of tokens; from N on, rows of stored inputs."""
        taps = np.zeros((self._padded, width), dtype=np.int64)
        for row, (start, length) in enumerate(zip(self._starts, self._lengths, strict=True)):
            offsets = np.arange(length)[:, None] + np.arange(1 - width, 1)
            stored = self._padded + (row + 1) * (width - 1) + offsets
            taps[start : start + length] = np.where(offsets >= 0, start + offsets, stored)
        return taps

    def scan(self, layer: int, inputs: DeltaInputs) -> Tensor:
        return scan(inputs, self._cache.states[layer], self._pieces)

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self._cache.device)


def _split_into_blocks(
    start: int, length: int, position: int, begin: int, table: NDArray[np.int32]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield a row of `Pieces` per block for a sequence that continues at `position` from block `begin`."""
    end = start + length
    while start < end:
        count, block = min(BLOCK - position % BLOCK, end - start), int(table[position // BLOCK])
        yield start, count, begin, block
        start, position, begin = start + count, position + count, block


@dataclass(slots=True, eq=False)
class HybridAttention:
    """The `Attention` of a model with attention layers and recurrent layers."""

    attention: Attention
    recurrence: PagedRecurrence

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        return self.attention(q, k, v, layer)
