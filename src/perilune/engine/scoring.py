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

MAX_LOGITS = 1 << 26  # numbers in memory at a time

PromptLogprobs = tuple[NDArray[np.float32], TopLogprobs]
"""Log-probs of the scored tokens of a text, and the most likely tokens of each position if requested."""


@dataclass(frozen=True, slots=True)
class ScoringPair:
    """A prompt and its answer as one sequence.

    Attributes:
        tokens: int64[T], prompt and answer.
        answer_tokens: number of tokens of the answer.
        block_size: tokens per block of the cache.
    """

    tokens: NDArray[np.int64]
    answer_tokens: int
    block_size: int = BLOCK

    @property
    def blocks(self) -> int:
        """Number of blocks for the keys and values."""
        return blocks_for(len(self.tokens), self.block_size)

    @property
    def size(self) -> NDArray[np.int64]:
        """Numbers of tokens, blocks and rows of logits."""
        return np.array([len(self.tokens), self.blocks, self.answer_tokens])

    def predicts_answer(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return, for each position, whether the next token belongs to the answer."""
        after: NDArray[np.int64] = positions + 1
        return (after >= len(self.tokens) - self.answer_tokens) & (after < len(self.tokens))


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of one step.

    Attributes:
        tokens, rows: maximum number of tokens, and of rows of logits.
        blocks: maximum number of blocks, for each window.
        chunk_tokens: maximum number of tokens of a step that computes a part of a sequence which is too long
            for one step.
    """

    tokens: int
    blocks: int
    rows: int
    chunk_tokens: int

    def allows(self, size: NDArray[np.int64]) -> bool:
        """Return whether one step can compute `size`: tokens, blocks and rows."""
        return bool((size <= (self.tokens, self.blocks, self.rows)).all())


def split_batches(pairs: Sequence[ScoringPair], limits: StepLimits) -> Iterator[list[ScoringPair]]:
    """Yield all pairs in order, in batches that fit one step. A pair that needs several steps is a batch."""
    batch: list[ScoringPair] = []
    size = np.zeros(3, dtype=np.int64)
    for pair in pairs:
        if batch and not limits.allows(size + pair.size):
            yield batch
            batch, size = [], np.zeros(3, dtype=np.int64)
        batch.append(pair)
        size += pair.size
    if batch:
        yield batch


def make_steps(
    pairs: Sequence[ScoringPair], blocks: Blocks, adapter: int, limits: StepLimits
) -> Iterator[tuple[StepBatch, NDArray[np.int64]]]:
    """Yield the steps that compute `pairs`, each with the tokens int64[R] that its logits predict.

    Args:
        blocks: int32[W, C], as many as all pairs need together.
        adapter: number of an adapter, or -1.
    """
    counts = np.array([pair.blocks for pair in pairs])
    tables = np.zeros((len(blocks), len(pairs), int(counts.max())), dtype=np.int32)
    tables[:, np.arange(tables.shape[2]) < counts[:, None]] = blocks
    longest = max(len(pair.tokens) for pair in pairs)
    together = limits.allows(np.sum([pair.size for pair in pairs], axis=0))
    chunk_tokens = longest if together else min(limits.chunk_tokens, limits.rows)
    for start in range(0, longest, chunk_tokens):
        fed = [np.arange(start, min(start + chunk_tokens, len(pair.tokens))) for pair in pairs]
        predicting = [pair.predicts_answer(positions) for pair, positions in zip(pairs, fed, strict=True)]
        targets = [
            pair.tokens[positions[mask] + 1]
            for pair, positions, mask in zip(pairs, fed, predicting, strict=True)
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


def top_tokens(logits: Tensor, count: int) -> TopLogprobs:
    """Return the `count` most likely tokens of each row of logits float[R, V], with their log-probs."""
    best = logits.topk(min(count, logits.shape[1])).indices
    ranks = [token_logprobs(logits, tokens.contiguous())[0] for tokens in best.unbind(dim=1)]
    rows = zip(best.tolist(), torch.stack(ranks, dim=1).tolist(), strict=True)
    return [list(zip(tokens, logprobs, strict=True)) for tokens, logprobs in rows]
