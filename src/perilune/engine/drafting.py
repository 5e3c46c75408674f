"""Draft models: cheaper models that propose the next tokens of samples.

A draft draws with the random numbers that the sampler will use at the same positions, and applies
temperature, top-k, top-p and min-p. So where the draft has the model's distribution, it proposes the token
that the sampler draws, at any temperature.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perilune.engine.blocks import BLOCK, Blocks, extend_digests
from perilune.engine.native_runner import NativeRunner
from perilune.engine.runner import Runner
from perilune.engine.sampler import draw_ahead
from perilune.engine.select_runner import fastest_runner
from perilune.engine.sequences import Rows, Sequences
from perilune.engine.speculation import Tokens
from perilune.engine.step import StepBatch
from perilune.errors import RequestError
from perilune.models.decoder import Decoder

_INT8_COST = 0.5  # time of a step with int8 matrices, relative to float32 (docs/results/speculation.md)
_PREFILL_CHUNK_TOKENS = 1024  # most tokens of a prompt that a draft computes at once


class Draft:
    """Samples draft tokens from a copy of the model with int8 matrices, on the model's own cache.

    The draft writes keys and values to the cache. The step that verifies its tokens overwrites them.

    Args:
        cost: time of a step of the draft, as a share of a step of the model.
    """

    def __init__(self, sequences: Sequences, runner: Runner, cost: float) -> None:
        self._sequences, self._runner, self.cost = sequences, runner, cost

    def propose(self, rows: Rows, limits: Tokens) -> list[Tokens]:
        sequences = self._sequences
        starts = self._prepare(rows)
        lengths = sequences.length[rows]
        tables = self._tables(rows)
        inputs = [
            sequences.tokens[row, start:length]
            for row, start, length in zip(rows, starts, lengths, strict=True)
        ]
        drafted = np.zeros((len(rows), int(limits.max())), dtype=np.int64)
        active = np.arange(len(rows))
        for offset in range(drafted.shape[1]):
            logits = self._runner.run(_make_batch(inputs, starts, tables[:, active]))
            drafted[active, offset] = draw_ahead(sequences, logits, rows[active], offset)
            active = active[limits[active] > offset + 1]
            starts, inputs = lengths[active] + offset, list(drafted[active, offset : offset + 1])
        self._record_drafts(rows, limits)
        return [tokens[:count] for tokens, count in zip(drafted, limits.tolist(), strict=True)]

    def _prepare(self, rows: Rows) -> Tokens:
        """Fill the cache up to the last token of each row; return int64[B], the first uncached positions."""
        first: Tokens = self._sequences.length[rows] - 1
        return first

    def _tables(self, rows: Rows) -> Blocks:
        """Return the block tables int32[W, B, columns]."""
        tables: Blocks = self._sequences.blocks[:, rows, : int(self._sequences.num_blocks[rows].max())]
        return tables

    def _record_drafts(self, rows: Rows, counts: Tokens) -> None:
        """Record that the cache has all tokens of `rows`, and all but the last of `counts` draft tokens."""


class DraftModel(Draft):
    """Samples draft tokens from another model, with a cache of its own.

    The draft's cache uses the block numbers that the scheduler allocates for the model's layers with the
    largest window. Some of these blocks hold tokens that the draft has not computed, and blocks are shared,
    copied and reused. The draft therefore remembers for each block a hash of the block's tokens and all
    tokens before. `_prepare` computes the tokens that the draft's cache lacks.

    Args:
        windows: number of distinct windows of the draft.
        table: index of the model's block table to use.
    """

    def __init__(
        self, sequences: Sequences, runner: Runner, cost: float, *, windows: int, table: int
    ) -> None:
        super().__init__(sequences, runner, cost)
        self._windows, self._table = windows, table
        self._digests: dict[int, bytes] = {}  # by block, the digest of its content in the draft's cache
        rows = len(sequences.entries)
        # For each row: its sample, the number of tokens in the cache, and the block of the last of them.
        self._arrival, self._known, self._last = np.zeros((3, rows), dtype=np.int64)

    def _prepare(self, rows: Rows) -> Tokens:
        return np.array([self._prefill(row) for row in rows.tolist()])

    def _tables(self, rows: Rows) -> Blocks:
        return np.repeat(super()._tables(rows)[self._table][None], self._windows, axis=0)

    def _record_drafts(self, rows: Rows, counts: Tokens) -> None:
        self._known[rows] = known = self._sequences.length[rows] - 1 + counts
        self._last[rows] = self._block_of(rows, known - 1)
        self._arrival[rows] = self._sequences.arrival[rows]

    def _prefill(self, row: int) -> int:
        """Compute all tokens of `row` but the last, and return the first position that is not cached."""
        sequences, known = self._sequences, int(self._known[row])
        last = int(sequences.length[row]) - 1
        same = (
            self._arrival[row] == sequences.arrival[row] and self._block_of(row, known - 1) == self._last[row]
        )
        if same and known >= last - 1:
            return min(known, last)
        digests: list[bytes] = []
        extend_digests(digests, b"", sequences.tokens[row, :last])
        blocks = sequences.blocks[self._table, row, : sequences.num_blocks[row]].tolist()
        num_cached = 0
        while num_cached < len(digests) and self._digests.get(blocks[num_cached]) == digests[num_cached]:
            num_cached += 1
        digests += [b""] * len(blocks)  # for the blocks that are not full
        self._digests.update(zip(blocks[num_cached:], digests[num_cached:], strict=False))
        rows = np.array([row])
        for start in range(num_cached * BLOCK, last, _PREFILL_CHUNK_TOKENS):
            inputs = sequences.tokens[row, start : min(start + _PREFILL_CHUNK_TOKENS, last)]
            self._runner.run(_make_batch([inputs], np.array([start]), self._tables(rows)))
        return last

    def _block_of(self, rows: Rows | int, position: Tokens | int) -> NDArray[np.int32]:
        blocks: NDArray[np.int32] = self._sequences.blocks[self._table, rows, position // BLOCK]
        return blocks


def _make_batch(inputs: Sequence[NDArray[np.integer]], starts: Tokens, tables: Blocks) -> StepBatch:
    """Return a batch of sequences that begin at `starts`, with the logits after the last token of each."""
    counts = np.array([len(tokens) for tokens in inputs])
    ends = np.concatenate([[0], np.cumsum(counts)])
    positions = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    return StepBatch(
        np.concatenate(inputs).astype(np.int64),
        np.concatenate(positions),
        ends,
        len(inputs) if (counts == 1).all() else 0,
        tables,
        ends[1:] - 1,
    )


def make_draft_runner(
    draft: Decoder | None, runner: Runner, decoder: Decoder, num_blocks: int, positions: int
) -> Runner:
    """Return a runner for `draft` with its own cache; without a draft, for the model in int8 on its cache.

    Args:
        runner, decoder: those of the model.
        num_blocks: blocks of the engine's largest pool.
        positions: maximum number of tokens of prompt and sample together in the engine.

    Raises:
        RequestError: when the draft has another vocabulary, fewer positions or linear attention. Without a
            draft, when the C kernels do not compute the model.
    """
    if draft is None:
        if not isinstance(runner, NativeRunner):
            raise RequestError(
                f"{type(runner).__name__} cannot draft with int8 weights",
                where="speculation",
                remedy="give a draft model, or set method to 'lookup'",
            )
        return NativeRunner(decoder, runner.cache.num_blocks, "int8", runner.cache)
    model_vocab, draft_vocab = decoder.config.vocab_size, draft.config.vocab_size
    if model_vocab != draft_vocab:
        raise RequestError(
            f"the model has a vocabulary of {model_vocab:,} tokens, the draft one of {draft_vocab:,}",
            where="speculation",
            remedy="use a draft of the same family",
        )
    if draft.config.delta is not None:
        raise RequestError(
            "the draft has linear attention, whose state cannot drop a rejected token",
            where="speculation",
            remedy="use a draft that has attention in every layer",
        )
    draft_positions = draft.config.max_position_embeddings
    if draft_positions < positions:
        raise RequestError(
            f"the draft has {draft_positions:,} positions, the engine {positions:,}",
            where="speculation",
            remedy="use a draft with more positions, or give the engine fewer cache_tokens",
        )
    return fastest_runner(draft, [num_blocks] * len(draft.config.distinct_windows))


def make_draft(sequences: Sequences, runner: Runner, decoder: Decoder, draft: Decoder | None) -> Draft:
    """Return the draft that runs on `runner`, which `make_draft_runner` created."""
    if draft is None:
        return Draft(sequences, runner, _INT8_COST)
    windows, table = len(draft.config.distinct_windows), decoder.config.widest_window
    cost = _count_parameters(draft) / _count_parameters(decoder)
    return DraftModel(sequences, runner, cost, windows=windows, table=table)


def _count_parameters(decoder: Decoder) -> int:
    return sum(parameter.numel() for parameter in decoder.parameters())
