"""The state of samples in flight as arrays: row i of each array belongs to one sample.

Every step touches every sample. One Python object per sample would take longer than a small model.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from perilune.engine.blocks import BLOCK, Blocks, blocks_for, extend_digests, root_digest
from perilune.engine.random import uniforms
from perilune.engine.request import Request

Rows = NDArray[np.int64]

_UNIFORMS_PER_ROW = 64  # positions of a sample for which random numbers are generated at a time


@dataclass(slots=True, eq=False)
class Entry:
    """A request and its progress.

    Attributes:
        id: the request id that `Engine.add` returns.
        prompt: int32[P].
        unfinished: number of samples that have not ended.
        adapter: number of the adapter, or -1.
        admitted: number of samples that have been assigned a row, including ended ones.
        root: `root_digest` of the weights that `digests` belong to.
        digests: digests of the full blocks of the prompt.
    """

    id: int
    request: Request
    prompt: NDArray[np.int32]
    unfinished: int
    adapter: int = -1
    admitted: int = 0
    root: bytes = b""
    digests: list[bytes] = field(default_factory=list)

    def block_digests(self, version: int, tokens: NDArray[np.int32], size: int = BLOCK) -> list[bytes]:
        """Return the digests of the full blocks of a sample. The digests of the prompt are computed once."""
        root = root_digest(version, self.adapter)
        if self.request.inputs is not None:  # the tokens do not determine the inputs, so share no blocks
            root = root_digest(version, -2 - self.id)
        if self.root != root:
            self.root, self.digests = root, []
            extend_digests(self.digests, root, self.prompt, size)
        digests = self.digests[: len(tokens) // size]
        if len(tokens) // size > len(digests):
            extend_digests(digests, root, tokens, size)
        return digests


class Sequences:
    """State of up to `rows` samples.

    Attributes:
        entries: the request of each row, None for a free row.
        sample: int64, index of the sample in its request.
        arrival: int64, increasing with the time of arrival.
        prompt_length: int64, number of tokens of the prompt.
        length: int64, number of known tokens, those of the prompt included.
        limit: int64, `length` at which the sample ends.
        computed: int64, number of tokens whose keys and values are in the cache.
        tokens: int32[rows, width], by position.
        logprobs, versions: float32 and int32[rows, width], by position; set for sampled tokens only.
        blocks, num_blocks: int32[W, rows, columns] block tables, one per window size among the layers, and
            the number of filled columns of each row.
        cached: int64, tokens of the prompt found in the prefix cache.
        released_columns: int64[W, rows], number of columns before the window, whose blocks were released.
        stale: bool, whether older weights computed some of the sample's keys and values.
        adapter: int32, number of the adapter of the row, or -1.
        scale: float32, 1 / temperature; 0 takes the most likely token.
        top_k, top_p, min_p, repetition_penalty, min_length: options, by row.
        plain: bool, whether temperature is the only option.
        stop_ids: int64[rows, *], the stop tokens, padded with -1.
        embedded: bool, whether the request has input embeddings.
    """

    def __init__(self, rows: int, vocab_size: int, windows: int = 1, block_size: int = BLOCK) -> None:
        self.vocab_size, self._block_size = vocab_size, block_size
        self.entries: list[Entry | None] = [None] * rows
        self.sample, self.arrival, self.prompt_length, self.length, self.limit, self.computed = np.zeros(
            (6, rows), dtype=np.int64
        )
        self.tokens = np.zeros((rows, 0), dtype=np.int32)
        self.logprobs = np.zeros((rows, 0), dtype=np.float32)
        self.versions = np.zeros((rows, 0), dtype=np.int32)
        self.blocks: Blocks = np.zeros((windows, rows, 0), dtype=np.int32)
        self.num_blocks = np.zeros(rows, dtype=np.int64)
        self.cached = np.zeros(rows, dtype=np.int64)
        self.released_columns = np.zeros((windows, rows), dtype=np.int64)
        self.stale = np.zeros(rows, dtype=np.bool_)
        self.adapter = np.full(rows, -1, dtype=np.int32)
        self.scale, self.top_p, self.min_p, self.repetition_penalty = np.ones((4, rows), dtype=np.float32)
        self.top_k, self.min_length = np.zeros((2, rows), dtype=np.int64)
        self.plain = np.ones(rows, dtype=np.bool_)
        self.embedded = np.zeros(rows, dtype=np.bool_)
        self.stop_ids = np.full((rows, 1), -1, dtype=np.int64)
        self._keys = np.zeros((rows, 4), dtype=np.uint64)
        self._first = np.zeros(rows, dtype=np.int64)  # position of the token that random number 0 draws
        self._ahead = np.zeros((rows, _UNIFORMS_PER_ROW))
        self._ahead_from = np.zeros(rows, dtype=np.int64)
        self._arrivals = 0

    def assign_row(self, row: int, entry: Entry, sample: int) -> None:
        """Start sample `sample` of `entry` in the free row `row`."""
        request, prompt = entry.request, entry.prompt
        params, length = request.params, len(prompt)
        self.entries[row] = entry
        self.sample[row] = sample
        self._arrivals += 1
        self.arrival[row] = self._arrivals
        self.prompt_length[row] = self.length[row] = length
        self.limit[row] = length + params.max_tokens
        self._reserve(length + params.max_tokens)
        self.tokens[row, :length] = prompt
        self.computed[row] = self.num_blocks[row] = self.cached[row] = 0
        self.released_columns[:, row] = 0
        self.stale[row] = False
        self.adapter[row] = entry.adapter
        self.scale[row] = 1 / params.temperature if params.temperature else 0
        self.top_k[row] = min(params.top_k, self.vocab_size)
        self.top_p[row], self.min_p[row] = params.top_p, params.min_p
        self.repetition_penalty[row] = params.repetition_penalty
        self.min_length[row] = length + params.min_tokens
        self.plain[row] = params.is_plain and request.constraint is None
        self.embedded[row] = request.inputs is not None
        stops = set(params.stop_token_ids)
        if request.constraint is not None:
            stops |= set(request.constraint.stop_token_ids)
        self._set_stops(row, sorted(stops))
        self._keys[row] = (*request.key, request.first_sample + sample)
        self._first[row] = length - request.position
        self._ahead_from[row] = length - _UNIFORMS_PER_ROW

    def append(
        self, rows: Rows, tokens: NDArray[np.int64], logprobs: NDArray[np.float32], version: int
    ) -> None:
        """Append the next token of each of `rows`."""
        lengths = self.length[rows]
        cells = rows * self.tokens.shape[1] + lengths
        self.tokens.ravel()[cells] = tokens
        self.logprobs.ravel()[cells] = logprobs
        self.versions.ravel()[cells] = version
        self.computed[rows] = lengths
        self.length[rows] = lengths + 1

    def uniforms(self, rows: Rows, ahead: int = 0) -> NDArray[np.float64]:
        """Return float64[B] random numbers in [0, 1) for the token `ahead` positions after the next one."""
        column = self.length[rows] + ahead - self._ahead_from[rows]
        due = column >= _UNIFORMS_PER_ROW
        if due.any():
            refilled = rows[due]
            self._ahead_from[refilled] = start = self.length[refilled]
            positions = (start - self._first[refilled])[:, None] + np.arange(_UNIFORMS_PER_ROW)
            self._ahead[refilled] = uniforms(self._keys[refilled], positions)
            column[due] = ahead
        drawn: NDArray[np.float64] = self._ahead[rows, column]
        return drawn

    def ends_with_stop_token(self, rows: Rows) -> NDArray[np.bool_]:
        """Return bool[B], whether the last token of each of `rows` is one of its stop tokens."""
        stopped: NDArray[np.bool_] = (self.stop_ids[rows] == self.last_tokens(rows)[:, None]).any(axis=1)
        return stopped

    def last_tokens(self, rows: Rows) -> NDArray[np.int32]:
        """Return the last token of each of `rows`, int32[B]."""
        last: NDArray[np.int32] = self.tokens.ravel()[rows * self.tokens.shape[1] + self.length[rows] - 1]
        return last

    def sampled_tokens(self, row: int) -> NDArray[np.int32]:
        """Return the sampled tokens int32[T]; for a resumed sample, also those that its prompt contains."""
        return self.tokens[row, self._first[row] : self.length[row]]

    def add_blocks(self, rows: Rows, blocks: Blocks) -> None:
        """Append a column int32[W, B] to the tables of `rows`."""
        self.blocks[:, rows, self.num_blocks[rows]] = blocks
        self.num_blocks[rows] += 1

    def table(self, row: int) -> Blocks:
        """Return the block tables int32[W, columns] of one row."""
        return self.blocks[:, row, : self.num_blocks[row]]

    def _set_stops(self, row: int, stops: list[int]) -> None:
        missing = len(stops) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(stops)] = stops

    def _reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens."""
        missing = length - self.tokens.shape[1]
        if missing <= 0:
            return
        missing = max(missing, self.tokens.shape[1] // 2)
        more = (0, 0), (0, missing)
        self.tokens, self.versions = np.pad(self.tokens, more), np.pad(self.versions, more)
        self.logprobs = np.pad(self.logprobs, more)
        columns = blocks_for(self.tokens.shape[1], self._block_size) - self.blocks.shape[2]
        self.blocks = np.pad(self.blocks, ((0, 0), (0, 0), (0, columns)))
