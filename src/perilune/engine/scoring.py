"""Scoring: which answers are fed together, and as what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perilune.engine.blocks import BLOCK, Blocks, blocks_for
from perilune.engine.step import StepBatch

MOST_LOGITS = 1 << 26  # held at a time

Pair = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Tokens of a prompt and of its answer."""


def in_batches(
    pairs: Sequence[Pair], most_tokens: int, most_blocks: int, most_logits: int
) -> Iterator[list[Pair]]:
    """All pairs in order, as many at a time as stay within the bounds, or one that alone does not."""
    batch: list[Pair] = []
    sizes = np.zeros(3, dtype=np.int64)
    bounds = (most_tokens, most_blocks, most_logits)
    for prompt, answer in pairs:
        total = len(prompt) + len(answer)
        size = np.array([total, blocks_for(total), len(answer)])
        if batch and (sizes + size > bounds).any():
            yield batch
            batch, sizes = [], np.zeros(3, dtype=np.int64)
        batch.append((prompt, answer))
        sizes += size
    if batch:
        yield batch


@dataclass(frozen=True, slots=True, eq=False)
class ScoredBatch:
    """Pairs end to end.

    Attributes:
        step: their tokens; logits are wanted where an answer's tokens are predicted.
        targets: int64[R], those tokens.
        bounds: where the answers of one pair end and the next begin, among the R.
    """

    step: StepBatch
    targets: NDArray[np.int64]
    bounds: NDArray[np.int64]


def blocks_of(pairs: Sequence[Pair]) -> int:
    """How many blocks they need."""
    return sum(blocks_for(len(prompt) + len(answer)) for prompt, answer in pairs)


def lay_out(pairs: Sequence[Pair], blocks: Blocks, adapter: int) -> ScoredBatch:
    """Feed `pairs` whole, into `blocks`, with the adapter of that number (-1 for none)."""
    tokens = np.concatenate([part for pair in pairs for part in pair])
    answers = np.array([len(answer) for _, answer in pairs])
    lengths = answers + [len(prompt) for prompt, _ in pairs]
    ends = np.cumsum(lengths)
    counts = -(-lengths // BLOCK)
    tables = np.zeros((len(pairs), int(counts.max())), dtype=np.int32)
    tables[np.arange(tables.shape[1]) < counts[:, None]] = blocks
    before = np.concatenate(
        [np.arange(end - count, end) - 1 for end, count in zip(ends, answers, strict=True)]
    )
    step = StepBatch(
        token_ids=tokens,
        positions=np.concatenate([np.arange(length) for length in lengths]),
        cu_seqlens=np.array([0, *ends]),
        decodes=0,
        block_tables=tables,
        logit_rows=before,
        adapters=None if adapter < 0 else np.full(len(pairs), adapter, dtype=np.int32),
    )
    return ScoredBatch(step, tokens[before + 1], np.cumsum(answers)[:-1])
