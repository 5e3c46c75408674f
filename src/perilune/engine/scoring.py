"""Batches and steps for scoring given answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.engine.blocks import BLOCK, Blocks, blocks_for
from perilune.engine.request import TopLogprobs
from perilune.engine.step import StepBatch
from perilune.models.logprobs import token_logprobs

MOST_LOGITS = 1 << 26  # in memory at a time

PromptLogprobs = tuple[NDArray[np.float32], TopLogprobs]
"""Log-probs of the scored tokens of a text, and the most likely tokens of each place if requested."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and its answer as one sequence.

    Attributes:
        tokens: int64[T], prompt and answer.
        answer: number of tokens of the answer.
        block_size: tokens per block of the cache.
    """

    tokens: NDArray[np.int64]
    answer: int
    block_size: int = BLOCK

    @property
    def blocks(self) -> int:
        """Blocks that its keys and values take."""
        return blocks_for(len(self.tokens), self.block_size)

    @property
    def size(self) -> NDArray[np.int64]:
        """Tokens, blocks and rows of logits."""
        return np.array([len(self.tokens), self.blocks, self.answer])

    def predicting(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the next token belongs to the answer, for each position."""
        after: NDArray[np.int64] = positions + 1
        return (after >= len(self.tokens) - self.answer) & (after < len(self.tokens))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one step.

    Attributes:
        tokens, rows: most tokens, and most rows of logits.
        blocks: most blocks, for each window.
        piece: most tokens of a step that computes a part of a sequence, when the whole does not fit.
    """

    tokens: int
    blocks: int
    rows: int
    piece: int

    def allow(self, size: NDArray[np.int64]) -> bool:
        """Whether one step can compute `size`: tokens, blocks and rows."""
        return bool((size <= (self.tokens, self.blocks, self.rows)).all())


def in_batches(pairs: Sequence[Pair], bounds: Bounds) -> Iterator[list[Pair]]:
    """All pairs in order, in batches that fit one step; a pair that needs several steps is alone."""
    batch: list[Pair] = []
    size = np.zeros(3, dtype=np.int64)
    for pair in pairs:
        if batch and not bounds.allow(size + pair.size):
            yield batch
            batch, size = [], np.zeros(3, dtype=np.int64)
        batch.append(pair)
        size += pair.size
    if batch:
        yield batch


def lay_out(
    pairs: Sequence[Pair], blocks: Blocks, adapter: int, bounds: Bounds
) -> Iterator[tuple[StepBatch, NDArray[np.int64]]]:
    """The steps that compute a batch in blocks int32[W, C], with an adapter number or -1.

    Each comes with the tokens int64[R] that its logits predict.
    """
    counts = np.array([pair.blocks for pair in pairs])
    tables = np.zeros((len(blocks), len(pairs), int(counts.max())), dtype=np.int32)
    tables[:, np.arange(tables.shape[2]) < counts[:, None]] = blocks
    longest = max(len(pair.tokens) for pair in pairs)
    together = bounds.allow(np.sum([pair.size for pair in pairs], axis=0))
    piece = longest if together else min(bounds.piece, bounds.rows)
    for start in range(0, longest, piece):
        fed = [np.arange(start, min(start + piece, len(pair.tokens))) for pair in pairs]
        predicting = [pair.predicting(positions) for pair, positions in zip(pairs, fed, strict=True)]
        targets = [
            pair.tokens[positions[which] + 1]
            for pair, positions, which in zip(pairs, fed, predicting, strict=True)
        ]
        step = StepBatch(
            token_ids=np.concatenate(
                [pair.tokens[positions] for pair, positions in zip(pairs, fed, strict=True)]
            ),
            positions=np.concatenate(fed),
            cu_seqlens=np.cumsum([0, *map(len, fed)]),
            decodes=0,
            block_tables=tables,
            logit_rows=np.flatnonzero(np.concatenate(predicting)),
            adapters=None if adapter < 0 else np.full(len(pairs), adapter, dtype=np.int32),
        )
        yield step, np.concatenate(targets)


def most_likely(logits: Tensor, count: int) -> TopLogprobs:
    """The `count` most likely tokens of each row of logits float[R, V], with their log-probs."""
    best = logits.topk(min(count, logits.shape[1])).indices
    ranks = [token_logprobs(logits, tokens.contiguous())[0] for tokens in best.unbind(dim=1)]
    rows = zip(best.tolist(), torch.stack(ranks, dim=1).tolist(), strict=True)
    return [list(zip(tokens, logprobs, strict=True)) for tokens, logprobs in rows]
