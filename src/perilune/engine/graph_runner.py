"""The runner for GPUs, which replays CUDA graphs for steps in which all samples decode.

A step of a small model runs hundreds of kernels of a few microseconds each. Launching them from Python takes
longer than running them, whereas a graph launches all of them at once. A graph has a fixed shape, so the
runner keeps one graph for each `bucket` of row counts and block table widths. Graphs are captured on first
use and share their memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from perilune.engine.blocks import BLOCK
from perilune.engine.decode_step import DecodeAttention, DecodeStep, MixedAttention, TritonAttention
from perilune.engine.native_runner import CacheKind
from perilune.engine.runner import TorchRunner
from perilune.engine.step import StepBatch
from perilune.errors import RequestError
from perilune.models.attention import Attention
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.decoder import Decoder
from perilune.models.feed_forward import MixtureOfExperts
from perilune.models.grouped_experts import GroupedProduct
from perilune.models.kernels import has_triton
from perilune.models.narrow import NarrowKind

_FEWEST_COLUMNS = 1024 // BLOCK
_COLUMN_STEP = 4  # factor between widths: programs for columns beyond the end of a sequence exit at once


class GraphRunner(TorchRunner):
    """Computes decoding steps with the kernels of `models/triton_attention.py` and CUDA graphs.

    Steps with prefill, LoRA adapters or input embeddings run without a graph. Experts are computed by the
    kernel of `models/triton_experts.py` in all steps.

    Args:
        decoder: the decoder whose weights are copied. `load_weights` overwrites the copy in place, so graphs
            stay valid.
        num_blocks: blocks of the cache for each of the `distinct_windows`, including the null block.
        weights: how matrices are stored; by default products have the decoder's precision. int8 saves memory
            but no time, because matrices are widened for each product.
        cache: how keys and values are stored; by default in the dtype of activations, or bfloat16 with
            bfloat16 weights or products.
        attention: attention of decoding samples.
        experts: products of experts; by default the Triton kernel.

    Raises:
        RequestError: when Triton is not installed, or `supports` does not accept the model.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_blocks: Sequence[int],
        weights: NarrowKind | None = None,
        cache: CacheKind | None = None,
        attention: DecodeAttention = TritonAttention,
        *,
        experts: GroupedProduct | None = None,
    ) -> None:
        if not supports(decoder.config):
            raise RequestError(
                f"the kernels of this runner do not compute {decoder.config.architecture}",
                remedy="use TorchRunner, which `fastest_runner` chooses by itself",
            )
        if attention is TritonAttention and not has_triton():
            raise RequestError(
                "decoding on a GPU needs Triton, which is not installed",
                remedy='pip install "perilune[gpu]"',
            )
        if cache is None and weights is None and decoder.precision == "bfloat16":
            cache = "bfloat16"
        super().__init__(
            decoder, num_blocks, None if cache is None else getattr(torch, cache), weights=weights
        )
        if experts is None and self._device.type == "cuda":
            from perilune.models.triton_experts import grouped_product

            experts = grouped_product
        if experts is not None:
            for module in self.decoder.modules():
                if isinstance(module, MixtureOfExperts):
                    module.use_grouped_product(experts)
        self._attend = attention
        self._steps: dict[tuple[int, int], DecodeStep] = {}
        self._graphs = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> Tensor:
        count = len(batch.token_ids)
        if batch.decodes < count or batch.adapters is not None or batch.inputs is not None:
            return super().run(batch)
        if self._adapted is not None:
            self._adapted.select_rows(batch)
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


def supports(config: DecoderConfig) -> bool:
    """Return whether the kernels compute this model.

    They do not support latent or linear attention, attention sinks, capped scores, or experts with biases.
    """
    plain = config.latent is None and config.delta is None and not config.family.expert_bias
    return plain and not config.family.sinks and config.score_softcap is None


def bucket(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of the graph that computes `rows` rows with block tables of `columns` columns.

    Row counts are 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ...: an unused row costs less than capturing a graph,
    which takes as long as dozens of steps.
    """
    power = (rows - 1).bit_length()
    step = 1 << power if rows <= 8 else max(8, 1 << power - 2)
    width = _FEWEST_COLUMNS
    while width < columns:
        width *= _COLUMN_STEP
    return -(-rows // step) * step, width
