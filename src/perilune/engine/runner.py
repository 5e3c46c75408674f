"""Runners: what computes a step.

A runner holds weights and a paged cache, and knows neither requests nor sampling. `TorchRunner` runs the
decoder that learns, so that its numbers are the learner's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.adapters import AdaptedProjections
from perilune.engine.blocks import Blocks
from perilune.engine.cache import PagedAttention, PagedCache
from perilune.engine.native_attention import NativePagedAttention
from perilune.engine.step import StepBatch
from perilune.models.adapters.files import Adapter
from perilune.models.attention import Attention
from perilune.models.decoder import Decoder
from perilune.models.kernels import is_native
from perilune.models.narrow import NarrowKind

_ROWS = 16  # a new number of rows costs oneDNN a new kernel: there are multiples of this, and few large ones


class Runner(Protocol):
    """Computes logits, and keeps keys and values."""

    def run(self, batch: StepBatch) -> Tensor:
        """float32[R, V] logits of `batch.logit_rows`; keys and values of all tokens are in the cache then.

        In one call, the keys and values of a token are stored before any later token of its sequence
        reads them. Tokens of different sequences do not read each other.
        """

    def copy_blocks(self, sources: Blocks, targets: Blocks) -> None:
        """Copy the content of blocks int32[W, C], for each window, over others."""

    def load_weights(self, decoder: Decoder) -> None:
        """Compute with the present weights of `decoder` from now on; later changes to it are not seen."""

    def clear(self) -> None:
        """Forget the content of the cache, so that all of it is finite again."""


@runtime_checkable
class AdaptingRunner(Runner, Protocol):
    """One that can apply LoRA adapters."""

    def load_adapters(self, adapters: Sequence[Adapter], decoder: Decoder) -> None:
        """Let `StepBatch.adapters` be indices of `adapters` from now on; `decoder` has the base's weights."""


class TorchRunner:
    """The decoder in torch, with paged attention by gathering.

    In float32 on a CPU a token gets the same bits in every batch and in however many chunks it is fed; they
    are the learner's.

    Args:
        decoder: whose weights are copied.
        num_blocks: of the cache for each of the `distinct_windows`, the null block included.
        cache_dtype: of keys and values; by default the decoder's, and bfloat16 where weights are asked for in
            that.
        cache: one to share with another runner, instead of one of its own.
        weights: how matrices are kept; by default so that products have the decoder's precision.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_blocks: Sequence[int],
        cache_dtype: torch.dtype | None = None,
        cache: PagedCache | None = None,
        weights: NarrowKind | None = None,
    ) -> None:
        self._kind = weights
        self.decoder = decoder.frozen(weights)
        self._adapted: AdaptedProjections | None = None
        self._device = decoder.model.norm.weight.device
        dtype = cache_dtype or (torch.bfloat16 if weights == "bfloat16" else decoder.dtype)
        self.cache = cache or PagedCache(decoder.config, num_blocks, dtype, self._device)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> Tensor:
        count = len(batch.token_ids)
        rows = _padded_rows(count)
        tokens, positions = np.zeros((2, rows), dtype=np.int64)
        tokens[:count], positions[:count] = batch.token_ids, batch.positions
        attention = self._attention(batch, rows)
        if self._adapted is not None:
            self._adapted.select(batch)
        hidden = self.decoder(self._tensor(tokens), self._tensor(positions), attention)
        wanted = len(batch.logit_rows)
        if wanted == count == batch.decodes:
            return self.decoder.logits(hidden)[:count].float()
        at = np.zeros(_padded_rows(wanted), dtype=np.int64)
        at[:wanted] = batch.logit_rows
        return self.decoder.logits(hidden[self._tensor(at)])[:wanted].float()

    def _attention(self, batch: StepBatch, rows: int) -> Attention:
        """Of the same arithmetic as the learner's."""
        if is_native(self.decoder.model.norm.weight, self.cache.size):
            return NativePagedAttention(self.cache, batch)
        return PagedAttention(self.cache, batch, rows)

    @torch.inference_mode()
    def copy_blocks(self, sources: Blocks, targets: Blocks) -> None:
        self.cache.copy(sources, targets)

    def load_weights(self, decoder: Decoder) -> None:
        self.decoder.refreeze(decoder, self._kind)

    def load_adapters(self, adapters: Sequence[Adapter], decoder: Decoder) -> None:
        self._adapted = AdaptedProjections(self.decoder, adapters)

    @torch.inference_mode()
    def clear(self) -> None:
        self.cache.clear()

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _padded_rows(count: int) -> int:
    """`count` or a little more."""
    step = _ROWS
    while step * 16 < count:
        step *= 2
    return -(-count // step) * step
