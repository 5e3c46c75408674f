"""Runners compute steps: tokens in, logits out.

A runner holds weights and a paged cache. It has no notion of requests or sampling. `TorchRunner` runs the
same decoder code as the learner, so its results equal the learner's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.adapters import AdaptedProjections
from perilune.engine.blocks import Blocks
from perilune.engine.cache import PagedCache, slot_mapping
from perilune.engine.native_attention import NativePagedAttention
from perilune.engine.paged_attention import PagedAttention
from perilune.engine.recurrence import HybridAttention, PagedRecurrence
from perilune.engine.routes import RouteRecorder, RouteStore
from perilune.engine.step import StepBatch
from perilune.errors import RequestError
from perilune.models.adapters.files import Adapter
from perilune.models.attention import Attention
from perilune.models.decoder import Decoder
from perilune.models.kernels import is_native
from perilune.models.narrow import NarrowKind

_ROW_MULTIPLE = 16  # oneDNN compiles a kernel for each number of rows, so batches are padded to a few sizes


class Runner(Protocol):
    """An executor of steps, which computes logits and stores keys and values."""

    def run(self, batch: StepBatch) -> Tensor:
        """Compute logits float32[R, V] of `batch.logit_rows`, and store the keys and values of all tokens.

        The keys and values of a token are stored before a later token of its sequence reads them. Sequences
        do not read each other's tokens.
        """

    def copy_blocks(self, sources: Blocks, targets: Blocks) -> None:
        """Copy the content of blocks int32[W, C] over other blocks, for each window."""

    def load_weights(self, decoder: Decoder) -> None:
        """Copy the current weights of `decoder`. Later changes to it have no effect."""

    def clear(self) -> None:
        """Zero the cache, so that all of it is finite again."""


@runtime_checkable
class AdapterRunner(Runner, Protocol):
    """A runner that can apply LoRA adapters."""

    def load_adapters(self, adapters: Mapping[int, Adapter], decoder: Decoder) -> None:
        """Use `adapters`, by their numbers in `StepBatch.adapters`, on the base weights of `decoder`.

        A number always stands for the same adapter.
        """


@runtime_checkable
class HiddenStateRunner(Runner, Protocol):
    """A runner that can compute hidden states."""

    def as_torch_runner(self, decoder: Decoder) -> TorchRunner:
        """Return a torch runner with the same weights. If it needs a copy, it copies them from `decoder`."""


@runtime_checkable
class RoutingRunner(Runner, Protocol):
    """A runner that can record the routes of a mixture of experts."""

    def record_routes(self) -> RouteStore:
        """Record routes from now on, and return their store.

        Raises:
            RequestError: for a dense model.
        """


def record_routes_of(runner: Runner) -> RouteStore:
    """Make `runner` record routes, and return their store.

    Raises:
        RequestError: for a dense model, or a runner that cannot record.
    """
    if not isinstance(runner, RoutingRunner):
        raise RequestError(
            f"{type(runner).__name__} cannot record which experts compute a token",
            remedy="remove routing_replay, or use a mixture of experts that Perilune computes itself",
        )
    return runner.record_routes()


def offloadable_cache(runner: Runner) -> PagedCache:
    """Return the cache of `runner`, from which blocks can be offloaded.

    Raises:
        RequestError: when the runner does not use Perilune's `PagedCache`.
    """
    cache = getattr(runner, "cache", None)
    if not isinstance(cache, PagedCache):
        raise RequestError(
            f"{type(runner).__name__} cannot offload its cache",
            remedy="turn offloading off, or use a model that Perilune computes itself",
        )
    return cache


def sleeping_error() -> RequestError:
    """Return the error for work that a sleeping engine cannot do."""
    return RequestError("the engine sleeps", remedy="call `Engine.wake_up`")


class SleepingRunner:
    """The runner of a sleeping engine, with neither weights nor a cache."""

    def run(self, batch: StepBatch) -> Tensor:
        raise sleeping_error()

    def copy_blocks(self, sources: Blocks, targets: Blocks) -> None:
        raise sleeping_error()

    def load_weights(self, decoder: Decoder) -> None:
        """Do nothing: the next runner copies the weights of the decoder."""

    def load_adapters(self, adapters: Mapping[int, Adapter], decoder: Decoder) -> None:
        """Do nothing: the next runner gets the adapters."""

    def clear(self) -> None:
        """Do nothing."""


class TorchRunner:
    """The decoder in torch, with paged attention that gathers blocks.

    In float32 on a CPU, the logits of a token have the same bits in every batch and for every division of its
    sequence into steps, and equal the learner's.

    Args:
        decoder: the decoder whose weights are copied.
        num_blocks: blocks of the cache for each of the `distinct_windows`, including the null block.
        cache_dtype: dtype of keys and values; by default the decoder's, or bfloat16 with bfloat16 weights.
        cache: the cache of another runner to share.
        weights: how matrices are stored; by default products have the decoder's precision.

    Attributes:
        takes_inputs: whether the runner supports `Request.inputs`.
    """

    takes_inputs = True

    def __init__(
        self,
        decoder: Decoder,
        num_blocks: Sequence[int],
        cache_dtype: torch.dtype | None = None,
        cache: PagedCache | None = None,
        weights: NarrowKind | None = None,
    ) -> None:
        self._kind = weights
        self.decoder = decoder.frozen_copy(weights)
        self._adapted: AdaptedProjections | None = None
        self._device = decoder.model.norm.weight.device
        dtype = cache_dtype or (torch.bfloat16 if weights == "bfloat16" else decoder.dtype)
        self.cache = cache or PagedCache(decoder.config, num_blocks, dtype, self._device)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> Tensor:
        count, hidden = len(batch.token_ids), self.hidden_states(batch)
        if batch.inputs is not None:
            deliver_hidden_states(batch, hidden[self._tensor(batch.logit_rows)])
        needed = len(batch.logit_rows)
        if needed == count == batch.decodes:
            return self.decoder.logits(hidden)[:count].float()
        rows = np.zeros(_pad_row_count(needed), dtype=np.int64)
        rows[:needed] = batch.logit_rows
        return self.decoder.logits(hidden[self._tensor(rows)])[:needed].float()

    @torch.inference_mode()
    def hidden_states(self, batch: StepBatch) -> Tensor:
        """Compute the last hidden states float[N, d] of all tokens, padded at the end."""
        count = len(batch.token_ids)
        rows = _pad_row_count(count)
        tokens, positions = np.zeros((2, rows), dtype=np.int64)
        tokens[:count], positions[:count] = batch.token_ids, batch.positions
        attention = self._attention(batch, rows)
        if self._adapted is not None:
            self._adapted.select_rows(batch)
        token_ids = self._tensor(tokens)
        inputs = None if batch.inputs is None else embed_inputs(self.decoder, batch, token_ids)
        hidden: Tensor = self.decoder(
            token_ids, self._tensor(positions), attention, self._recorder(batch, rows), inputs
        )
        return hidden

    def as_torch_runner(self, decoder: Decoder) -> TorchRunner:
        return self

    def with_cache(self, cache: PagedCache) -> TorchRunner:
        """Return a runner with the same weights and adapters on another cache."""
        other = copy.copy(self)
        other.cache = cache
        return other

    def _attention(self, batch: StepBatch, rows: int) -> Attention:
        """Return the attention of the batch, with the arithmetic of the learner."""
        config = self.decoder.config
        has_kernel = config.latent is None and config.score_softcap is None
        attention: Attention
        if is_native(self.decoder.model.norm.weight, self.cache.size) and has_kernel:
            attention = NativePagedAttention(self.cache, batch)
        else:
            attention = PagedAttention(self.cache, batch, rows)
        if not self.cache.states:
            return attention
        return HybridAttention(attention, PagedRecurrence(self.cache, batch, rows))

    def _recorder(self, batch: StepBatch, rows: int) -> RouteRecorder | None:
        if self.cache.routes is None:
            return None
        blocks, offsets = slot_mapping(batch, rows, self._device)
        return self.cache.make_recorder(list(blocks), offsets)

    def record_routes(self) -> RouteStore:
        return self.cache.record_routes(self.decoder.config)

    @torch.inference_mode()
    def copy_blocks(self, sources: Blocks, targets: Blocks) -> None:
        self.cache.copy(sources, targets)

    def load_weights(self, decoder: Decoder) -> None:
        self.decoder.refreeze(decoder, self._kind)

    def load_adapters(self, adapters: Mapping[int, Adapter], decoder: Decoder) -> None:
        self._adapted = self._adapted or AdaptedProjections(self.decoder)
        self._adapted.set_adapters(adapters)

    @torch.inference_mode()
    def clear(self) -> None:
        self.cache.clear()

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def embed_inputs(decoder: Decoder, batch: StepBatch, token_ids: Tensor) -> Tensor:
    """Return the inputs float[N, d] of `decoder`: the rows of `batch.inputs`, or the embeddings of tokens."""
    x = decoder.embed(token_ids)
    bounds, positions = batch.cu_seqlens.tolist(), batch.positions
    for inputs, start, stop in zip(batch.inputs or (), bounds, bounds[1:], strict=False):
        if inputs is not None:
            first = int(positions[start])
            x[start:stop] = inputs.rows(first, first + stop - start)
    return x


def deliver_hidden_states(batch: StepBatch, hidden: Tensor) -> None:
    """Pass hidden states float[R, d] to requests with input embeddings, before their tokens are drawn."""
    sequences = np.searchsorted(batch.cu_seqlens, batch.logit_rows, side="right") - 1
    for sequence, state in zip(sequences.tolist(), hidden, strict=True):
        inputs = batch.inputs[sequence] if batch.inputs else None
        if inputs is not None:
            inputs.receive_hidden_state(state.clone())


def _pad_row_count(count: int) -> int:
    """Round `count` up, so that few different sizes occur."""
    step = _ROW_MULTIPLE
    while step * 16 < count:
        step *= 2
    return -(-count // step) * step
