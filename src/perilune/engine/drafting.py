"""Drafts: cheaper models that propose the next tokens of samples.

A draft draws with the random numbers that the sampler will use at the same positions, and with temperature,
top-k, top-p and min-p. A draft with the model's distribution therefore proposes exactly the token that the
sampler draws, at any temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
_PIECE = 1024  # most tokens of a prompt that a draft computes at once


class Draft:
    """Samples draft tokens from the model in fewer bits, on the model's own cache.

    The step that verifies draft tokens overwrites what the draft writes to the cache.

    Args:
        cost: time of a step of the draft, as a share of a step of the model.
    """

    def __init__(self, sequences: Sequences, runner: Runner, cost: float) -> None:
        self._sequences, self._runner, self.cost = sequences, runner, cost

    def propose(self, rows: Rows, most: Tokens) -> list[Tokens]:
        sequences = self._sequences
        starts = self._begin(rows)
        lengths = sequences.length[rows]
        tables = self._tables(rows)
        fed = [
            sequences.tokens[row, start:length]
            for row, start, length in zip(rows, starts, lengths, strict=True)
        ]
        drafted = np.zeros((len(rows), int(most.max())), dtype=np.int64)
        going = np.arange(len(rows))
        for at in range(drafted.shape[1]):
            logits = self._runner.run(_batch(fed, starts, tables[:, going]))
            drafted[going, at] = draw_ahead(sequences, logits, rows[going], at)
            going = going[most[going] > at + 1]
            starts, fed = lengths[going] + at, list(drafted[going, at : at + 1])
        self._finish(rows, most)
        return [tokens[:count] for tokens, count in zip(drafted, most.tolist(), strict=True)]

    def _begin(self, rows: Rows) -> Tokens:
        """Fill the cache up to the last token of each row; int64[B], the first positions not in the cache."""
        first: Tokens = self._sequences.length[rows] - 1
        return first

    def _tables(self, rows: Rows) -> Blocks:
        """Block tables int32[W, B, columns]."""
        tables: Blocks = self._sequences.blocks[:, rows, : int(self._sequences.num_blocks[rows].max())]
        return tables

    def _finish(self, rows: Rows, counts: Tokens) -> None:
        """The cache now has the last tokens of `rows` and all but the last of `counts` drafts."""


class DraftModel(Draft):
    """Samples draft tokens from another model.

    Its cache has the block numbers of those layers of the model that have the largest window.

    The model can compute tokens that the draft has not computed, and blocks are shared, copied and reused.
    The cache therefore identifies the content of a block by a hash of its tokens and of all tokens before it.
    `_begin` computes the tokens that the cache lacks.

    Args:
        windows: number of distinct windows of the draft.
        table: index of the model's block table to use.
    """

    def __init__(
        self, sequences: Sequences, runner: Runner, cost: float, *, windows: int, table: int
    ) -> None:
        super().__init__(sequences, runner, cost)
        self._windows, self._table = windows, table
        self._digests: dict[int, bytes] = {}  # of the draft's content of each block
        rows = len(sequences.entries)
        # For each row: its sample, the number of tokens in the cache, and the block of the last of them.
        self._arrival, self._known, self._last = np.zeros((3, rows), dtype=np.int64)

    def _begin(self, rows: Rows) -> Tokens:
        return np.array([self._fill(row) for row in rows.tolist()])

    def _tables(self, rows: Rows) -> Blocks:
        return np.repeat(super()._tables(rows)[self._table][None], self._windows, axis=0)

    def _finish(self, rows: Rows, counts: Tokens) -> None:
        self._known[rows] = known = self._sequences.length[rows] - 1 + counts
        self._last[rows] = self._block_of(rows, known - 1)
        self._arrival[rows] = self._sequences.arrival[rows]

    def _fill(self, row: int) -> int:
        """The first position of `row` that is not in the cache, after computing all but its last token."""
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
        held = 0
        while held < len(digests) and self._digests.get(blocks[held]) == digests[held]:
            held += 1
        for block, digest in zip(blocks[held:], [*digests[held:], *[b""] * len(blocks)], strict=False):
            self._digests[block] = digest
        rows = np.array([row])
        for start in range(held * BLOCK, last, _PIECE):
            fed = sequences.tokens[row, start : min(start + _PIECE, last)]
            self._runner.run(_batch([fed], np.array([start]), self._tables(rows)))
        return last

    def _block_of(self, rows: Rows | int, position: Tokens | int) -> NDArray[np.int32]:
        blocks: NDArray[np.int32] = self._sequences.blocks[self._table, rows, position // BLOCK]
        return blocks


def _batch(fed: Sequence[NDArray[np.integer]], starts: Tokens, tables: Blocks) -> StepBatch:
    """A step of sequences that begin at `starts`, with the logits after the last token of each."""
    counts = np.array([len(tokens) for tokens in fed])
    ends = np.concatenate([[0], np.cumsum(counts)])
    positions = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    return StepBatch(
        np.concatenate(fed).astype(np.int64),
        np.concatenate(positions),
        ends,
        len(fed) if (counts == 1).all() else 0,
        tables,
        ends[1:] - 1,
    )


@dataclass(frozen=True, slots=True)
class DraftPlace:
    """The engine that a draft proposes tokens for.

    Attributes:
        runner, decoder: of the model.
        num_blocks: blocks of the largest pool.
        positions: most tokens of a sample with its prompt.
    """

    runner: Runner
    decoder: Decoder
    num_blocks: int
    positions: int


def draft_runner(draft: Decoder | None, place: DraftPlace) -> Runner:
    """A runner for `draft` with a cache of its own, or for the model in int8 on the model's cache.

    Raises:
        RequestError: when the draft has another vocabulary, fewer positions or linear attention. Without a
            draft, when the C kernels do not compute the model.
    """
    if draft is None:
        if not isinstance(place.runner, NativeRunner):
            raise RequestError(
                f"{type(place.runner).__name__} cannot draft with int8 weights",
                where="speculation",
                remedy="give a draft model, or set method to 'lookup'",
            )
        return NativeRunner(place.decoder, place.runner.cache.num_blocks, "int8", place.runner.cache)
    own, other = place.decoder.config.vocab_size, draft.config.vocab_size
    if own != other:
        raise RequestError(
            f"the model has a vocabulary of {own:,} tokens, the draft one of {other:,}",
            where="speculation",
            remedy="use a draft of the same family",
        )
    if draft.config.delta is not None:
        raise RequestError(
            "the draft has linear attention, whose state cannot drop a rejected token",
            where="speculation",
            remedy="use a draft that has attention in every layer",
        )
    few = draft.config.max_position_embeddings
    if few < place.positions:
        raise RequestError(
            f"the draft has {few:,} positions, the engine {place.positions:,}",
            where="speculation",
            remedy="use a draft with more positions, or give the engine fewer cache_tokens",
        )
    return fastest_runner(draft, [place.num_blocks] * len(draft.config.distinct_windows))


def make_draft(sequences: Sequences, runner: Runner, decoder: Decoder, draft: Decoder | None) -> Draft:
    """The draft that runs on `runner`, which `draft_runner` created."""
    if draft is None:
        return Draft(sequences, runner, _INT8_COST)
    windows, table = len(draft.config.distinct_windows), decoder.config.widest
    return DraftModel(sequences, runner, _size(draft) / _size(decoder), windows=windows, table=table)


def _size(decoder: Decoder) -> int:
    return sum(parameter.numel() for parameter in decoder.parameters())
