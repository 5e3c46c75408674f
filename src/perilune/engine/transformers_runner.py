"""A runner for models that the decoder does not implement, computed by transformers.

The runner puts correctness before speed. Every step copies the keys and values of each sequence from their
blocks into a cache of transformers, and copies the new keys and values back. Sequences of different lengths
are padded on the left and computed together if a trial shows that padding does not change the results.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.blocks import BLOCK, Blocks
from perilune.engine.step import StepBatch
from perilune.errors import RequestError
from perilune.models.transformers_model import TransformersModel

_PROBE = 5  # tokens
_TOLERANCE = 1e-2  # share of the largest logit: above bfloat16 rounding, below the effect of a lost state


class TransformersRunner:
    """Computes steps of a `TransformersModel`.

    The log-probs of a token agree across batches only up to rounding.

    Args:
        model: the model; its weights are not copied.
        num_blocks: one number, the blocks of the cache including the null block: this runner has one pool for
            all layers, with and without windows.

    Raises:
        RequestError: when the model's state is more than keys and values (a state-space model, for example),
            so that blocks cannot hold it.
    """

    def __init__(self, model: TransformersModel, num_blocks: Sequence[int]) -> None:
        self._model = model
        (blocks,) = num_blocks
        self._supports_padding = _check_padding(model)
        # Keys and values [blocks * 16, KV, D] per layer; empty for a layer that uses those of another.
        self._layers = [
            [part.new_zeros(blocks * BLOCK, part.shape[1], part.shape[3]) for part in layer]
            for layer in _probe_cache(model)
        ]

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> Tensor:
        if batch.adapters is not None and (batch.adapters >= 0).any():
            raise RequestError("adapters need Perilune's own decoder, but transformers computes this model")
        sequence_of = np.searchsorted(batch.cu_seqlens, batch.logit_rows, side="right") - 1
        rows_in = batch.logit_rows - batch.cu_seqlens[sequence_of]
        logits = None
        for sequences in _group_sequences(batch, self._supports_padding):
            needed = np.flatnonzero(np.isin(sequence_of, sequences))
            counts = np.diff(batch.cu_seqlens)
            # Sequences are aligned at the end.
            rows_in_padded = rows_in[needed] + counts[sequences].max() - counts[sequence_of[needed]]
            rows = np.unique(rows_in_padded)
            out = self._run_together(batch, sequences, rows)
            if logits is None:
                logits = out.new_empty(len(sequence_of), out.shape[-1], dtype=torch.float32)
            index = np.searchsorted(sequences, sequence_of[needed]), np.searchsorted(rows, rows_in_padded)
            logits[self._tensor(needed)] = out[self._tensor(index[0]), self._tensor(index[1])].float()
        assert logits is not None, "a batch without sequences"
        return logits

    def _run_together(
        self, batch: StepBatch, sequences: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> Tensor:
        """Return logits [S, R, V] of R rows of the new tokens of S sequences that end together."""
        starts = batch.cu_seqlens[sequences]
        counts, before = batch.cu_seqlens[sequences + 1] - starts, batch.positions[starts]
        new, past = int(counts.max()), int(before.max())
        # Position of each column in its sequence; negative where the sequence is shorter than the longest.
        positions = np.arange(past + new) - (past + new - before - counts)[:, None]
        clamped = np.maximum(positions, 0)
        tables = batch.block_tables[0, sequences]
        places = np.take_along_axis(tables, clamped // BLOCK, axis=1) * np.int64(BLOCK) + clamped % BLOCK
        fed = np.maximum(positions[:, past:] - before[:, None], 0)
        tokens = self._tensor(batch.token_ids[starts[:, None] + fed])
        cache = self._cache(self._tensor(places[:, :past]))
        padded = self._tensor(positions) if (positions < 0).any() else None
        # Some models treat an empty selection as all rows.
        rows = rows if len(rows) else np.array([0])
        logits = self._model.logits(tokens, cache, self._tensor(rows), padded)
        is_new = self._tensor(positions[:, past:] >= 0)
        written = self._tensor(places[:, past:])[is_new]
        for layer, cached in zip(self._layers, cache.layers, strict=False):
            for part, grown in zip(layer, (cached.keys, cached.values), strict=False):
                part[written] = grown[:, :, past:].transpose(1, 2)[is_new]
        return logits

    def _cache(self, places: Tensor) -> Any:
        """Return a cache of transformers with the keys and values at int64[S, T] places."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for index, layer in enumerate(self._layers):
            if layer and places.shape[1]:
                keys, values = (part[places].transpose(1, 2) for part in layer)
                cache.update(keys, values, index)
        return cache

    @torch.inference_mode()
    def copy_blocks(self, sources: Blocks, targets: Blocks) -> None:
        inside = np.arange(BLOCK)
        source, target = (
            self._tensor((blocks.astype(np.int64)[:, None] * BLOCK + inside).ravel())
            for (blocks,) in (sources, targets)
        )
        for part in chain.from_iterable(self._layers):
            part[target] = part[source]

    def load_weights(self, model: Any) -> None:
        self._model = model

    def clear(self) -> None:
        for part in chain.from_iterable(self._layers):
            part.zero_()

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._model.device)


def _group_sequences(batch: StepBatch, pads: bool) -> Iterator[NDArray[np.int64]]:
    """Yield groups of sequences, in ascending order, that can be computed together.

    Padding is left of all tokens. It therefore does not change the distance between two tokens, on which
    windows depend. Sequences with cached tokens need equal numbers of new tokens. Without padding, the
    sequences of a group also need equal numbers of cached tokens.
    """
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    before, counts = batch.positions[batch.cu_seqlens[:-1]], np.diff(batch.cu_seqlens)
    for sequence, (cached, new) in enumerate(zip(before.tolist(), counts.tolist(), strict=True)):
        if not pads:
            groups[cached, new].append(sequence)
        elif cached:
            groups[1, new].append(sequence)
        else:
            groups[0, new.bit_length()].append(sequence)  # at most half of a group is padding
    yield from (np.array(sequences) for sequences in groups.values())


def _check_padding(model: TransformersModel) -> bool:
    """Return whether a sequence that is padded on the left and computed in two steps has the same logits."""
    from transformers import DynamicCache

    tokens = torch.arange(_PROBE, device=model.device)[None] % model.config.vocab_size
    last = torch.zeros(1, dtype=torch.int64, device=model.device)
    positions = torch.arange(-2, _PROBE, device=model.device)[None]
    padded = torch.cat([tokens[:, :1], tokens[:, :1], tokens], dim=1)
    try:
        expected = model.logits(tokens, DynamicCache(), last + _PROBE - 1)
        cache: Any = DynamicCache()
        model.logits(padded[:, :-1], cache, last, positions[:, :-1])
        resumed = model.logits(padded[:, -1:], cache, last, positions)
    except (ValueError, TypeError, AttributeError, RuntimeError, IndexError):
        return False
    return bool((expected - resumed).abs().max() <= _TOLERANCE * expected.abs().max())


def _probe_cache(model: TransformersModel) -> list[list[Tensor]]:
    """Return keys and values [1, KV, T, D] of each layer, for a text computed in two steps.

    Raises:
        RequestError: when the result differs from one step, or the model caches something else.
    """
    from transformers import DynamicCache

    tokens = torch.arange(_PROBE, device=model.device)[None] % model.config.vocab_size
    last = torch.zeros(1, dtype=torch.int64, device=model.device)
    try:
        expected = model.logits(tokens, DynamicCache(), last + _PROBE - 1)
        cache: Any = DynamicCache()
        model.logits(tokens[:, :3], cache, last)
        resumed = model.logits(tokens[:, 3:], cache, last + _PROBE - 4)
    except (ValueError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        raise _cache_error(model, f"{type(error).__name__}: {error}".partition("\n")[0]) from None
    layers = [[layer.keys, layer.values] if layer.is_initialized else [] for layer in cache.layers]
    if not any(layers) or any(
        part.dim() != 4 or part.shape[2] != _PROBE for layer in layers for part in layer
    ):
        raise _cache_error(model, "keys and values do not grow with the text")
    if not (expected - resumed).abs().max() <= _TOLERANCE * expected.abs().max():
        raise _cache_error(model, "continuing the text gives other logits")
    return layers


def _cache_error(model: TransformersModel, why: str) -> RequestError:
    return RequestError(
        f"{type(model.module).__name__} cannot continue a text from keys and values alone ({why})",
        remedy="use a model with attention in every layer",
    )
