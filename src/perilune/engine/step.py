"""A step: what a runner computes at once, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perilune.engine.blocks import Blocks
from perilune.engine.sequences import Rows


@dataclass(slots=True, eq=False)
class StepBatch:
    """What a runner computes in one step: S sequences, N tokens in all, R rows of logits.

    Attributes:
        token_ids: int64[N], the fed tokens of all sequences, end to end.
        positions: int64[N], where each stands in its sequence.
        cu_seqlens: int64[S + 1], bounds of the sequences in the tokens.
        decodes: the first so many sequences have one token each.
        block_tables: int32[W, S, B], for each of the model's `distinct_windows` the block of positions
            16 j .. 16 j + 15 in column j; what lies behind a window or beyond a sequence's end is arbitrary.
        logit_rows: int64[R], tokens whose logits are wanted.
        adapters: int32[S], number of each sequence's adapter, -1 without; None when nobody has one.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    cu_seqlens: NDArray[np.int64]
    decodes: int
    block_tables: Blocks
    logit_rows: NDArray[np.int64]
    adapters: NDArray[np.int32] | None = None


@dataclass(slots=True, eq=False)
class Step:
    """A batch, and what follows from it.

    Attributes:
        rows: int64[D], the samples that draw a token.
        logits_of: int64[D], which row of the logits each draws from; None when the i-th from the i-th.
        chunks: (row, tokens fed) of samples that do not decode yet.
    """

    batch: StepBatch
    rows: Rows
    logits_of: NDArray[np.int64] | None
    chunks: list[tuple[int, int]]


@dataclass(slots=True)
class Counters:
    """What has happened since the engine was made.

    Attributes:
        steps: how many.
        prompt_tokens: tokens fed that were known already: prompts, and what was computed again.
        cached_tokens: such tokens that did not have to be fed, because the cache held them.
        preemptions: samples that had to give up their blocks.
    """

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
