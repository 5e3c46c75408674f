"""The runner for GPUs: steps in which every sample decodes are replayed from captured CUDA graphs.

A step of a small model is hundreds of kernels of a few microseconds each, which take longer to launch from
Python than to run. A graph launches them all at once. It has a fixed shape, so there is one for each of some
numbers of rows and of columns of the block table, captured when it is first needed; they share their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from perilune.engine.blocks import BLOCK
from perilune.engine.decode_step import DecodeAttention, DecodeStep, MixedAttention, TritonAttention
from perilune.engine.native_runner import CacheKind
from perilune.engine.runner import TorchRunner
from perilune.engine.step import StepBatch
from perilune.errors import RequestError
from perilune.models.attention import Attention
from perilune.models.decoder import Decoder
from perilune.models.narrow import NarrowKind

_FEWEST_COLUMNS = 1024 // BLOCK
_COLUMN_STEP = 4  # programs for keys that a sequence does not have end at once, and cost next to nothing


class GraphRunner(TorchRunner):
    """Decoding is attention by the kernels of `models/triton_attention.py`, and captured, where it can be.

    Computed as it comes, kernel by kernel, is what cannot: a step in which somebody is fed a prompt or has a
    LoRA adapter, and all of a mixture of experts, whose products have shapes that depend on the tokens.

    Args:
        decoder: whose weights are copied, and copied over at every `load_weights`: graphs stay valid.
        num_blocks: of the cache for each of the `distinct_windows`, the null block included.
        weights: how matrices are kept; by default so that products have the decoder's precision. In int8
            they are widened for each product, which saves memory and no time.
        cache: how keys and values are kept; by default as the decoder's activations, in bfloat16 also where
            weights in that are asked for.
        attention: of the samples that decode.

    Raises:
        RequestError: when Triton is not installed.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_blocks: Sequence[int],
        weights: NarrowKind | None = None,
        cache: CacheKind | None = None,
        attention: DecodeAttention = TritonAttention,
    ) -> None:
        if attention is TritonAttention and find_spec("triton") is None:
            raise RequestError(
                "Triton, which decoding on a GPU needs, is not installed",
                remedy='pip install "perilune[gpu]"',
            )
        super().__init__(
            decoder, num_blocks, None if cache is None else getattr(torch, cache), weights=weights
        )
        self._attend = attention
        self._steps: dict[tuple[int, int], DecodeStep] = {}
        captures = self._device.type == "cuda" and decoder.config.experts is None
        self._graphs = torch.cuda.graph_pool_handle() if captures else None

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> Tensor:
        count = len(batch.token_ids)
        if batch.decodes < count or batch.adapters is not None:
            return super().run(batch)
        if self._adapted is not None:
            self._adapted.select(batch)
        shape = bucket(count, batch.block_tables.shape[2])
        if shape not in self._steps:
            self._steps[shape] = DecodeStep(self.decoder, self.cache, shape, self._attend, self._graphs)
        hidden = self._steps[shape](batch)
        if len(batch.logit_rows) < count:
            hidden = hidden[self._tensor(batch.logit_rows)]
        return self.decoder.logits(hidden).float()

    def _attention(self, batch: StepBatch, rows: int) -> Attention:
        if not batch.decodes:
            return super()._attention(batch, rows)
        return MixedAttention(self.cache, batch, rows, self._attend)


def bucket(rows: int, columns: int) -> tuple[int, int]:
    """The shape in which so many rows, with block tables of so many columns, are computed."""
    step = 1 << (rows - 1).bit_length() if rows <= 8 else 8 if rows <= 256 else 64
    width = _FEWEST_COLUMNS
    while width < columns:
        width *= _COLUMN_STEP
    return -(-rows // step) * step, width
