"""Text embeddings: hidden states of the last layer, averaged over a text or taken from its last token.

Texts are computed in chunks on a separate KV cache, so that sampling can continue between chunks.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from perilune.engine.blocks import blocks_for
from perilune.engine.cache import PagedCache
from perilune.engine.runner import TorchRunner
from perilune.engine.scoring import ScoringPair, StepLimits, make_steps, split_batches

Pooling = Literal["mean", "last"]

_CHUNK_TOKENS = 512  # tokens that are computed at a time


@torch.inference_mode()
def compute_embeddings(
    runner: Callable[[], TorchRunner],
    texts: Sequence[Sequence[int]],
    pooling: Pooling,
    adapter: int,
) -> Iterator[list[NDArray[np.float32]]]:
    """Yield the embeddings float32[d] of tokenized texts in order, normalized to unit length.

    Each iteration computes at most `_CHUNK_TOKENS` tokens and yields the embeddings that it completes.

    Args:
        runner: returns the runner with the current weights; called in every iteration.
        pooling: "mean" averages the hidden states of a text; "last" takes that of its last token.
        adapter: number of an adapter, or -1.
    """
    pairs = [ScoringPair(np.array(text, dtype=np.int64), 0) for text in texts]
    max_blocks = max(blocks_for(max(map(len, texts))), blocks_for(_CHUNK_TOKENS))
    current = runner()
    config, model_cache = current.decoder.config, current.cache
    windows = len(config.distinct_windows)
    blocks = np.tile(np.arange(1, max_blocks + 1, dtype=np.int32), (windows, 1))
    limits = StepLimits(_CHUNK_TOKENS, max_blocks, _CHUNK_TOKENS, _CHUNK_TOKENS)
    cache = PagedCache(config, [max_blocks + 1] * windows, model_cache.dtype, model_cache.device)
    for batch in split_batches(pairs, limits):
        sums = torch.zeros(0)
        counts = [blocks_for(len(pair.tokens)) for pair in batch]
        for step, _ in make_steps(batch, blocks[:, : sum(counts)], adapter, limits):
            hidden = runner().with_cache(cache).hidden_states(step)[: len(step.token_ids)].float()
            ends = torch.from_numpy(step.cu_seqlens[1:]).to(hidden.device)
            if pooling == "last":
                sums = hidden[ends - 1]
            else:
                starts = [0, *ends[:-1].tolist()]
                new = torch.stack([hidden[a:b].sum(0) for a, b in zip(starts, ends.tolist(), strict=True)])
                sums = new if not sums.numel() else sums + new
            if int(step.positions[-1]) + 1 < len(batch[-1].tokens):
                yield []
        yield list(torch.nn.functional.normalize(sums, dim=1).cpu().numpy())
