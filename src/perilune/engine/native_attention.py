"""Describes steps and the cache to the C kernels, and wraps their attention for the decoder in torch."""

from ctypes import Array

import numpy as np
import torch
from torch import Tensor

from perilune.engine.cache import PagedCache
from perilune.engine.routes import RouteStore
from perilune.engine.step import StepBatch
from perilune.models.attention import AttentionLayer
from perilune.models.native import ops
from perilune.models.native.attention import Cache, RouteMemory, Step, attend_paged


def describe_cache(cache: PagedCache) -> Array[Cache]:
    """Return the cache of each layer for the kernels. `cache` must outlive the result."""
    parts = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    return (Cache * len(cache.table_of))(
        *(
            Cache(
                *(part[layer].data_ptr() if part else None for part in parts), ops.KINDS[cache.dtype], table
            )
            for layer, table in enumerate(cache.table_of)
        )
    )


class NativeStep:
    """A batch for the kernels.

    Args:
        routes: the store to which the kernels write the routes of the tokens; None to record none.

    Attributes:
        step: the argument of the kernels, with pointers into this object.
        logits: float32[R, V], which the kernels write.
    """

    def __init__(self, batch: StepBatch, vocab_size: int = 0, routes: RouteStore | None = None) -> None:
        self._arrays = [
            np.ascontiguousarray(array, dtype=np.int64)
            for array in (batch.token_ids, batch.positions, batch.logit_rows, batch.sequence_of)
        ]
        self._tables = np.ascontiguousarray(batch.block_tables, dtype=np.int32)
        self.logits = torch.empty(len(batch.logit_rows), vocab_size)
        self.step = Step(
            len(batch.token_ids),
            *self._tables.shape[1:],
            len(batch.logit_rows),
            *(array.ctypes.data for array in self._arrays),
            self._tables.ctypes.data,
            self.logits.data_ptr(),
            RouteMemory()
            if routes is None
            else RouteMemory(routes.experts.data_ptr(), routes.table, routes.dtype.itemsize, routes.layers),
        )


class NativePagedAttention:
    """An `Attention` for the decoder over the paged cache, which also stores the tokens of the step."""

    def __init__(self, cache: PagedCache, batch: StepBatch) -> None:
        self._caches, self._step = describe_cache(cache), NativeStep(batch)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        sinks = None if layer.options is None else layer.options.sinks
        cache, scale = (self._caches[layer.index], self._step.step), q.shape[-1] ** -0.5
        return attend_paged(q, k, v, cache, scale=scale, window=layer.window or 0, sinks=sinks)
