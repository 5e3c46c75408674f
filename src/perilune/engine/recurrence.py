"""Recurrent layers over the paged cache.

A block of such a layer holds one state: the state after the last computed token of the block. In a partly
filled block, this is the current state of its sample. In a full block, it is a snapshot, from which a request
with the same prefix continues. A token needs only the state after the previous token, like attention with a
window of two tokens, so block tables, forks, eviction and offloading work as for sliding windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.blocks import BLOCK
from perilune.engine.cache import PagedCache
from perilune.engine.step import StepBatch
from perilune.models.attention import Attention, AttentionLayer
from perilune.models.recurrence import DeltaInputs, convolve_rows, delta_step


class PagedRecurrence:
    """A `Recurrence` of one step that reads and stores states in blocks.

    Args:
        tokens: number of tokens that the decoder computes: those of the batch, and padding after them.
    """

    def __init__(self, cache: PagedCache, batch: StepBatch, tokens: int) -> None:
        self._cache, self._padded = cache, tokens
        starts, ends = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
        self._order = np.argsort(starts - ends, kind="stable")  # the longest first
        self._starts, self._lengths = starts[self._order], (ends - starts)[self._order]
        tables = batch.block_tables[cache.state_table][self._order]
        first = batch.positions[self._starts]
        rows = np.arange(len(first))
        self._begins = self._tensor(tables[rows, np.maximum(first - 1, 0) // BLOCK])
        self._fresh = self._tensor(np.flatnonzero(first == 0))
        self._steps = [self._step(at, first, tables) for at in range(int(self._lengths.max()))]
        self._taps: dict[int, Tensor] = {}

    def _step(self, at: int, first: NDArray[np.int64], tables: NDArray[np.int32]) -> _Step:
        active = np.flatnonzero(self._lengths > at)
        after = first[active] + at + 1
        stored = active[(after % BLOCK == 0) | (self._lengths[active] == at + 1)]
        blocks = tables[stored, (first[stored] + at) // BLOCK]
        return _Step(
            self._tensor(self._starts[active] + at),
            self._tensor(stored),
            self._tensor(blocks.astype(np.int64)),
        )

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        cache, width = self._cache.tails[layer], weight.shape[1]
        if width not in self._taps:
            self._taps[width] = self._tensor(self._make_taps(width))
        taps = self._taps[width]
        tails = cache[self._begins].to(x.dtype)
        tails[self._fresh] = 0
        rows = torch.cat([x, tails.flatten(0, 1)])
        for step in self._steps:
            if len(step.blocks):
                tokens = step.tokens[step.stored]
                cache[step.blocks] = rows[taps[tokens, 1:]].to(cache.dtype)
        return convolve_rows(rows, taps, weight)

    def _make_taps(self, width: int) -> NDArray[np.int64]:
        """int64[N, K], each token's inputs: rows of all tokens, then K - 1 stored inputs per sequence."""
        taps = np.zeros((self._padded, width), dtype=np.int64)
        for row, (start, length) in enumerate(zip(self._starts, self._lengths, strict=True)):
            at = np.arange(length)[:, None] + np.arange(1 - width, 1)
            stored = self._padded + (row + 1) * (width - 1) + at
            taps[start : start + length] = np.where(at >= 0, start + at, stored)
        return taps

    def scan(self, layer: int, inputs: DeltaInputs) -> Tensor:
        cache = self._cache.states[layer]
        state = cache[self._begins]
        state[self._fresh] = 0
        out = torch.zeros_like(inputs.v)
        for step in self._steps:
            of_tokens = DeltaInputs(*(x[step.tokens] for x in inputs))
            out[step.tokens], state = delta_step(state[: len(step.tokens)], of_tokens)
            if len(step.blocks):
                cache[step.blocks] = state[step.stored]
        return out

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self._cache.device)


@dataclass(slots=True, eq=False)
class _Step:
    """The token at one index of each sequence that is long enough, the longest sequences first.

    Attributes:
        tokens: int64, the rows of these tokens in the batch.
        stored: int64, the sequences whose state is stored after this token.
        blocks: int64, the block of each stored state.
    """

    tokens: Tensor
    stored: Tensor
    blocks: Tensor


@dataclass(slots=True, eq=False)
class WithRecurrence:
    """An `Attention` for a model that has recurrent layers too."""

    attention: Attention
    recurrence: PagedRecurrence

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        return self.attention(q, k, v, layer)
