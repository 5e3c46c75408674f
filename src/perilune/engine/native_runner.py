"""The runner for CPUs: one call of the C kernels computes a whole step on the paged cache."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from perilune.engine.blocks import Blocks
from perilune.engine.cache import PagedCache
from perilune.engine.native_attention import NativeStep, describe_cache
from perilune.engine.routes import RouteStore
from perilune.engine.runner import TorchRunner
from perilune.engine.step import StepBatch
from perilune.errors import RequestError
from perilune.models.adapters.files import Adapter
from perilune.models.decoder import Decoder, scale_logits
from perilune.models.native import decoder as native
from perilune.models.native.ops import WeightKind

CacheKind = Literal["float32", "bfloat16", "int8"]


class NativeRunner:
    """Computes in float32. Weights and cache may be stored in fewer bits.

    With both in float32, the logits of a token have the same bits in every batch and for every division of
    its sequence into steps, and equal the learner's. A `TorchRunner` on the same cache computes steps with
    adapters and hidden states.

    Args:
        decoder: the decoder whose weights are copied; `supports` must accept it.
        num_blocks: blocks of the cache for each of the `distinct_windows`, including the null block.
        weights: how matrices are stored; by default products have the decoder's precision.
        cache: how keys and values are stored, or the cache of another runner to share; by default in the
            dtype of activations, or bfloat16 with bfloat16 weights.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_blocks: Sequence[int],
        weights: WeightKind | None = None,
        cache: CacheKind | PagedCache | None = None,
    ) -> None:
        self._kind = weights or weight_kind(decoder)
        if not native.supports(decoder.config, self._kind):
            raise RequestError(
                f"the C kernels do not compute this {decoder.config.architecture} model",
                remedy="use TorchRunner, which `fastest_runner` chooses by itself",
            )
        if not isinstance(cache, PagedCache):
            kind = cache or ("bfloat16" if "bfloat16" in (weights, _dtype(decoder)) else "float32")
            cache = PagedCache(decoder.config, num_blocks, getattr(torch, kind))
        self.cache = cache
        self._config = decoder.config
        self._caches = describe_cache(self.cache)
        self._torch_runner: TorchRunner | None = None
        self._decoder = native.NativeDecoder(decoder, self._kind)

    def run(self, batch: StepBatch) -> Tensor:
        if batch.adapters is not None and self._torch_runner is not None:
            return self._torch_runner.run(batch)
        native_step = NativeStep(batch, self._config.vocab_size, self.cache.routes)
        self._decoder.step(self._caches, native_step.step, int(batch.positions.max()))
        return scale_logits(native_step.logits, self._config)

    def record_routes(self) -> RouteStore:
        return self.cache.record_routes(self._config)

    def copy_blocks(self, sources: Blocks, targets: Blocks) -> None:
        self.cache.copy(sources, targets)

    def load_weights(self, decoder: Decoder) -> None:
        self._decoder.load(decoder)
        if self._torch_runner is not None:
            self._torch_runner.load_weights(decoder)

    def load_adapters(self, adapters: Mapping[int, Adapter], decoder: Decoder) -> None:
        self.as_torch_runner(decoder).load_adapters(adapters, decoder)

    def as_torch_runner(self, decoder: Decoder) -> TorchRunner:
        if self._torch_runner is None:
            self._torch_runner = TorchRunner(decoder, self.cache.num_blocks, cache=self.cache)
        return self._torch_runner

    def clear(self) -> None:
        self.cache.clear()


def weight_kind(decoder: Decoder) -> WeightKind:
    """Return the kind that matches the decoder's dtype and precision."""
    return "bfloat16" if "bfloat16" in (decoder.precision, _dtype(decoder)) else "float32"


def _dtype(decoder: Decoder) -> str:
    return str(decoder.dtype).removeprefix("torch.")
