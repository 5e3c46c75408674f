"""A step of the engine: the batch that a runner computes, and what the scheduler needs afterwards."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perilune.engine.blocks import Blocks
from perilune.engine.request import InputEmbeddings
from perilune.engine.sequences import Rows


@dataclass(slots=True, eq=False)
class StepBatch:
    """The batch of one step: S sequences, N tokens in all, R rows of logits.

    Attributes:
        token_ids: int64[N], the new tokens of all sequences, end to end.
        positions: int64[N], the position of each token in its sequence.
        cu_seqlens: int64[S + 1], the index of the first token of each sequence, then N.
        decodes: number of decoding sequences. They come first and have one token each.
        block_tables: int32[W, S, B], one table for each of the model's `distinct_windows`. Column j holds the
            block of positions b j .. b j + b - 1, where b is the number of tokens per block (16 in most
            runners). Columns that lie before the window or beyond the end are arbitrary.
        logit_rows: int64[R], indices of the tokens whose logits are needed.
        adapters: int32[S], the adapter number of each sequence, or -1; None if no sequence has an adapter.
        inputs: the decoder's inputs of each sequence, or None for a sequence whose tokens are embedded; None
            if the tokens of all sequences are embedded.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    cu_seqlens: NDArray[np.int64]
    decodes: int
    block_tables: Blocks
    logit_rows: NDArray[np.int64]
    adapters: NDArray[np.int32] | None = None
    inputs: Sequence[InputEmbeddings | None] | None = None

    @property
    def sequence_of(self) -> NDArray[np.int64]:
        """int64[N], the sequence of each token."""
        tokens, counts = len(self.token_ids), np.diff(self.cu_seqlens)
        return np.arange(tokens) if self.decodes == tokens else np.repeat(np.arange(len(counts)), counts)


@dataclass(slots=True, eq=False)
class Proposal:
    """Draft tokens for a decoding sample.

    Attributes:
        row: the row of the sample.
        tokens: int64[k], the draft tokens.
        logits: row of the logits after the sample's last token. The next k rows are those after each draft
            token.
    """

    row: int
    tokens: NDArray[np.int64]
    logits: int = -1


@dataclass(slots=True, eq=False)
class Step:
    """A batch and the samples that draw from it.

    Attributes:
        rows: int64[D], the samples that draw a token.
        logits_of: int64[D], the row of logits of each sample; None when sample i uses row i.
        chunks: (row, number of new tokens) of each sample in prefill.
        proposals: the samples with draft tokens. The batch has these tokens after the sample's last token.
    """

    batch: StepBatch
    rows: Rows
    logits_of: NDArray[np.int64] | None
    chunks: list[tuple[int, int]]
    proposals: list[Proposal]


@dataclass(slots=True)
class Counters:
    """Counts since the engine was created.

    Attributes:
        steps: computed steps.
        prompt_tokens: tokens computed in prefill, of prompts and of preempted samples.
        cached_tokens: tokens not computed because the prefix cache had them.
        preemptions: samples preempted for lack of blocks.
        sampled_tokens: drawn tokens.
        proposed_tokens: draft tokens.
        accepted_tokens: draft tokens that equal the drawn tokens.
    """

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    sampled_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
