"""Embeddings: the hidden states of the last layer, averaged over a text or taken from its last token.

Texts are computed in chunks, on a separate KV cache, so that sampling can continue between chunks.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from perilune.engine.blocks import blocks_for
from perilune.engine.cache import PagedCache
from perilune.engine.runner import TorchRunner
from perilune.engine.scoring import Bounds, Pair, in_batches, lay_out

Pooling = Literal["mean", "last"]

_PIECE = 512  # tokens that are computed at a time


@torch.inference_mode()
def embeddings(
    runner: Callable[[], TorchRunner],
    texts: Sequence[Sequence[int]],
    pooling: Pooling,
    adapter: int,
) -> Iterator[list[NDArray[np.float32]]]:
    """The embeddings float32[d] of tokenised texts, of length 1, in order.

    Each iteration computes at most `_PIECE` tokens and returns the embeddings that it completes.

    Args:
        runner: returns the runner with the current weights.
        adapter: number of an adapter, or -1.
    """
    pairs = [Pair(np.array(text, dtype=np.int64), 0) for text in texts]
    most = max(blocks_for(max(map(len, texts))), blocks_for(_PIECE))
    current = runner()
    config, like = current.decoder.config, current.cache
    windows = len(config.distinct_windows)
    blocks = np.tile(np.arange(1, most + 1, dtype=np.int32), (windows, 1))
    bounds = Bounds(tokens=_PIECE, blocks=most, rows=_PIECE, piece=_PIECE)
    cache = PagedCache(config, [most + 1] * windows, like.dtype, like.device)
    for batch in in_batches(pairs, bounds):
        sums = torch.zeros(0)
        counts = [blocks_for(len(pair.tokens)) for pair in batch]
        for step, _ in lay_out(batch, blocks[:, : sum(counts)], adapter, bounds):
            hidden = runner().beside(cache).hidden(step)[: len(step.token_ids)].float()
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
