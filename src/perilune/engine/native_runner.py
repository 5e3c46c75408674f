"""The runner for CPUs: a whole step in one call of the C kernels, on the paged cache where it lies."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.blocks import Blocks
from perilune.engine.cache import PagedCache
from perilune.engine.scheduler import StepBatch
from perilune.models.decoder import Decoder
from perilune.models.native import decoder as native
from perilune.models.native import ops
from perilune.models.native.ops import WeightKind

CacheKind = Literal["float32", "bfloat16", "int8"]


class NativeRunner:
    """Computes in float32, from weights and a cache that may be kept in less.

    With both in float32 a token gets the same bits in every batch and in however many chunks it is fed, and
    they are the learner's. Steps with adapters are computed by a `TorchRunner` over the same cache.

    Args:
        decoder: whose weights are copied; `supports` must speak for it.
        num_blocks: of the cache, the null block included.
        weights: how matrices are kept; by default as the decoder keeps them.
        cache: how keys and values are kept; by default as the weights, and int8 only when asked for.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_blocks: int,
        weights: WeightKind | None = None,
        cache: CacheKind | None = None,
    ) -> None:
        self._kind = weights or weight_kind(decoder)
        kind = cache or ("bfloat16" if self._kind == "bfloat16" else "float32")
        self.cache = PagedCache(decoder.config, num_blocks, getattr(torch, kind))
        self._vocab_size = decoder.config.vocab_size
        self._cache = ops.Cache(
            keys=self.cache.keys.data_ptr(),
            values=self.cache.values.data_ptr(),
            key_scales=_pointer(self.cache.key_scales),
            value_scales=_pointer(self.cache.value_scales),
            blocks=num_blocks,
            kind=ops.KINDS[self.cache.keys.dtype],
        )
        self.take_weights(decoder)

    def run(self, batch: StepBatch) -> Tensor:
        step, held, logits = describe_step(batch, self._vocab_size)
        self._decoder.step(self._cache, step, int(batch.positions.max()))
        del held
        return logits

    def copy_blocks(self, sources: Blocks, targets: Blocks) -> None:
        self.cache.copy(sources, targets)

    def take_weights(self, decoder: Decoder) -> None:
        self._decoder = native.NativeDecoder(decoder, self._kind)

    def clear(self) -> None:
        self.cache.clear()


def weight_kind(decoder: Decoder) -> WeightKind:
    """As the decoder's own dtype says."""
    return "bfloat16" if decoder.model.embed_tokens.weight.dtype == torch.bfloat16 else "float32"


def describe_step(
    batch: StepBatch, vocab_size: int
) -> tuple[ops.Step, list[NDArray[np.int64] | NDArray[np.int32]], Tensor]:
    """What the kernels are told of a batch, the memory it lies in, and float32[R, V] for the logits."""
    rows = len(batch.token_ids)
    counts = np.diff(batch.cu_seqlens)
    sequence = np.arange(rows) if batch.decodes == rows else np.repeat(np.arange(len(counts)), counts)
    held = [
        np.ascontiguousarray(array, dtype=np.int64)
        for array in (batch.token_ids, batch.positions, batch.logit_rows, sequence)
    ]
    tables = np.ascontiguousarray(batch.block_tables, dtype=np.int32)
    logits = torch.empty(len(batch.logit_rows), vocab_size)
    names = ("tokens", "positions", "logit_rows", "sequence")
    step = ops.Step(
        rows=rows,
        tables_stride=tables.shape[1],
        logit_count=len(batch.logit_rows),
        **{name: array.ctypes.data for name, array in zip(names, held, strict=True)},
        tables=tables.ctypes.data,
        logits=logits.data_ptr(),
    )
    return step, [*held, tables], logits


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
