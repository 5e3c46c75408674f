"""What the C kernels are told of a step and of the cache, and their attention for a decoder in torch."""

from __future__ import annotations

from ctypes import Array

import numpy as np
import torch
from torch import Tensor

from perilune.engine.cache import PagedCache
from perilune.engine.step import StepBatch
from perilune.models.native import ops
from perilune.models.native.attention import Cache, Step, attend_paged


def describe_cache(cache: PagedCache) -> Array[Cache]:
    """Where the cache of each layer lies; it must outlive what is returned."""
    parts = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    return (Cache * len(cache.table_of))(
        *(
            Cache(
                *(part[layer].data_ptr() if part else None for part in parts), ops.KINDS[cache.dtype], table
            )
            for layer, table in enumerate(cache.table_of)
        )
    )


class DescribedStep:
    """A batch for the kernels.

    Attributes:
        step: what they take; it points into this object.
        logits: float32[R, V], written by a whole step.
    """

    def __init__(self, batch: StepBatch, vocab_size: int = 0) -> None:
        rows, counts = len(batch.token_ids), np.diff(batch.cu_seqlens)
        sequence = np.arange(rows) if batch.decodes == rows else np.repeat(np.arange(len(counts)), counts)
        self._held = [
            np.ascontiguousarray(array, dtype=np.int64)
            for array in (batch.token_ids, batch.positions, batch.logit_rows, sequence)
        ]
        self._tables = np.ascontiguousarray(batch.block_tables, dtype=np.int32)
        self.logits = torch.empty(len(batch.logit_rows), vocab_size)
        self.step = Step(
            rows,
            *self._tables.shape[1:],
            len(batch.logit_rows),
            *(array.ctypes.data for array in self._held),
            self._tables.ctypes.data,
            self.logits.data_ptr(),
        )


class NativePagedAttention:
    """Attention of the tokens of one step, which it also stores: an `Attention` for the decoder."""

    def __init__(self, cache: PagedCache, batch: StepBatch) -> None:
        self._caches, self._described = describe_cache(cache), DescribedStep(batch)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        return attend_paged(
            q, k, v, self._caches[layer], self._described.step,
            scale=q.shape[-1] ** -0.5, window=window or 0,
        )  # fmt: skip
