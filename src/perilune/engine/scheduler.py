"""The scheduler chooses the tokens of the next step and allocates blocks for their keys and values.

Every sample has `length` tokens, of which `computed` are in the cache. A step computes some of the rest.
Once all known tokens of a sample are in the cache, the sampler draws the next token. This one rule covers
decoding, prefill, chunked prefill, and prefill after a preemption.

Scheduling is first come, first served. Each step includes one token of every decoding sample. The rest of the
token budget goes to prompts, in chunks, and then to draft tokens (`speculation.py`). When blocks run out, the
sample that arrived last releases its blocks, and is recomputed from its tokens once enough blocks are free.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from perilune.engine.blocks import Blocks, blocks_for
from perilune.engine.pools import BlockPools
from perilune.engine.request import InputEmbeddings
from perilune.engine.sequences import Entry, Rows, Sequences
from perilune.engine.speculation import Speculation
from perilune.engine.step import Counters, Proposal, Step, StepBatch

# New samples are admitted once 1/8 of the rows are free, or after 8 steps, because prompts are cheaper in
# batches.
_REFILL_DIVISOR = 8
_REFILL_WAIT_STEPS = 8
_MIN_SHARED_BLOCKS = 4  # a sample waits while another one computes at least this many blocks of its prompt
_RESERVE_DIVISOR = 2  # a prompt is admitted if one free block remains for every second decoding sample

SequenceInputs = tuple[int, int, NDArray[np.int64]]
"""A row, the position of the first token that a step computes, and its tokens."""


class Scheduler:
    """The queue of waiting, running and preempted samples, from which each step is scheduled.

    Args:
        sequences: the state of the samples.
        pools: the blocks, from which the scheduler allocates.
        token_budget: maximum number of tokens of one step; at least one per row.
        counters: the counters to update.

    Attributes:
        decoding: int64[B], rows that compute one token per step.
        prefilling: rows in prefill, by arrival.
        preempted: rows whose blocks were taken away, by arrival.
        waiting: requests with samples that have no row yet.
        version: policy version of the current weights.
        speculation: proposes draft tokens for decoding samples; None without speculative decoding.
    """

    def __init__(
        self, sequences: Sequences, pools: BlockPools, token_budget: int, counters: Counters
    ) -> None:
        self.sequences, self.pools, self.token_budget = sequences, pools, token_budget
        self.decoding: Rows = np.zeros(0, dtype=np.int64)
        self.prefilling: list[int] = []
        self.preempted: list[int] = []
        self.waiting: deque[Entry] = deque()
        self.counters = counters
        self.version = 0
        self.speculation: Speculation | None = None
        self._followers: dict[int, list[int]] = {}  # the samples that wait for a row's prompt
        self._free_rows = list(range(len(sequences.entries) - 1, -1, -1))
        self._steps_since_refill = 0
        # Numbers of available blocks when the next sample was refused. The scheduler retries once more blocks
        # are available, a sample stops, or the prefix cache grows.
        self._refused_with: tuple[int, ...] = ()

    # -- requests ----------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> bool:
        """True if any sample is waiting, running or preempted."""
        return bool(len(self.decoding) or self.prefilling or self.preempted or self.waiting)

    def add(self, entry: Entry) -> None:
        """Queue a request. The caller has checked that the model and the cache can hold it."""
        self.waiting.append(entry)

    def rows_of(self, entry: Entry) -> list[int]:
        """Return the rows of a request."""
        return [row for row, other in enumerate(self.sequences.entries) if other is entry]

    def remove(self, entry: Entry) -> None:
        """Remove a request in any state."""
        self._refused_with = ()
        if entry in self.waiting:
            self.waiting.remove(entry)
        for row in self.rows_of(entry):
            self.release(row)

    def release(self, row: int, *, cache_blocks: bool = False) -> None:
        """Remove a sample and release its blocks; with `cache_blocks`, add them to the prefix cache first."""
        entry = self.sequences.entries[row]
        returns_in = 0.0
        if cache_blocks and row not in self.preempted and entry is not None:
            self._cache_blocks(row)
            returns_in = entry.request.returns_in
        self._stop_running(row)
        self._release_blocks(row, returns_in)
        if row in self.preempted:
            self.preempted.remove(row)
        self._followers.pop(row, None)  # they belong to the same request and are released too
        self.sequences.entries[row] = None
        self._free_rows.append(row)

    def switch_weights(self, version: int, *, recompute: bool) -> None:
        """Switch to the weights of `version` and empty the prefix cache.

        With `recompute`, samples in flight are computed again. Otherwise they continue on the keys and values
        of the old weights.
        """
        running = [*self.decoding.tolist(), *self.prefilling]
        if recompute:
            for row in running:
                self._preempt(row, cache_blocks=False)
        else:
            self.sequences.stale[running] = True
        self.version = version
        self.pools.clear()

    # -- the next step -----------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """Choose the next step; None when no sample can run."""
        self._allocate_decode_blocks()
        chunks = self._schedule_prefill()
        if not chunks and not len(self.decoding):
            return None
        self.counters.steps += 1
        budget = self.token_budget - len(self.decoding) - sum(count for _, count in chunks)
        return self._build_step(chunks, self._propose_drafts(budget))

    def _allocate_decode_blocks(self) -> None:
        """Allocate a block for every decoding sample whose last block is full."""
        sequences = self.sequences
        while True:
            rows = self.decoding
            due = rows[sequences.num_blocks[rows] * self.pools.block_size < sequences.length[rows]]
            if len(due) <= self.pools.num_available:
                break
            self._preempt(self._latest_row())
        if len(due):
            sequences.add_blocks(due, self.pools.allocate(len(due)))

    def _propose_drafts(self, budget: int) -> list[Proposal]:
        """Return proposals of at most `budget` draft tokens, in blocks that the step leaves free."""
        sequences, rows = self.sequences, self.decoding
        if self.speculation is None or not len(rows):
            return []
        limits = self.speculation.draft_limits(rows)
        limits = np.clip(budget - np.cumsum(limits) + limits, 0, limits)
        room = sequences.num_blocks[rows] * self.pools.block_size - sequences.length[rows]
        due = np.flatnonzero(limits > room)[: max(0, self.pools.num_available - len(rows))]
        if len(due):
            sequences.add_blocks(rows[due], self.pools.allocate(len(due)))
            room[due] += self.pools.block_size
        return self.speculation.propose(rows, np.minimum(limits, room))

    def _schedule_prefill(self) -> list[tuple[int, int]]:
        """Return (row, tokens) of the samples in prefill: first those already started, then new ones."""
        budget = self.token_budget - len(self.decoding)
        chunks = []
        for row in list(self.prefilling):
            if budget > 0 and row in self.prefilling and (count := self._allocate_chunk(row, budget)):
                chunks.append((row, count))
                budget -= count
        refill = self._refill_is_due()
        while budget > 0 and (admitted := self._admit(refill)) is not None:
            count = self._allocate_chunk(admitted, budget)
            chunks.append((admitted, count))
            budget -= count
        return chunks

    def _refill_is_due(self) -> bool:
        rows, free = len(self.sequences.entries), len(self._free_rows)
        self._steps_since_refill += 1
        if not free or not (free * _REFILL_DIVISOR >= rows or self._steps_since_refill >= _REFILL_WAIT_STEPS):
            return False
        self._steps_since_refill = 0
        return True

    def _allocate_chunk(self, row: int, limit: int) -> int:
        """Allocate blocks for at most `limit` tokens of `row`, and return the number of tokens."""
        sequences = self.sequences
        computed, allocated = int(sequences.computed[row]), int(sequences.num_blocks[row])
        count = min(int(sequences.length[row]) - computed, limit, self.pools.max_chunk_tokens)
        need = blocks_for(computed + count, self.pools.block_size) - allocated
        while need > self.pools.num_available and (latest := self._latest_row()) != row:
            self._preempt(latest)
        need = min(need, self.pools.num_available)
        count = min(count, (allocated + need) * self.pools.block_size - computed)
        if need:
            sequences.blocks[:, row, allocated : allocated + need] = self.pools.allocate(need)
            sequences.num_blocks[row] = allocated + need
        return count

    def _admit(self, refill: bool) -> int | None:
        """Start the prefill of one more sample, preempted or new, if there is room.

        A new request gets a row for each sample, as far as rows are free. The first row computes the prompt,
        and the other rows wait until it is computed.
        """
        if self._refused_with and not any(map(int.__gt__, self.pools.available, self._refused_with)):
            return None
        if self.preempted:
            row = self.preempted[0]
            if not self._has_room(row, 0):
                return None
            del self.preempted[0]
            self._start_prefill(row)
            return row
        if not (refill and self.waiting and self._free_rows):
            return None
        entry = self.waiting[0]
        count = min(len(self._free_rows), entry.request.n - entry.admitted)
        row, *followers = (self._free_rows.pop() for _ in range(count))
        self.sequences.assign_row(row, entry, entry.admitted)
        if self._should_wait_for_prefix(row) or not self._has_room(row, len(followers)):
            self.sequences.entries[row] = None
            self._free_rows += [*reversed(followers), row]
            return None
        for index, follower in enumerate(followers, entry.admitted + 1):
            self.sequences.assign_row(follower, entry, index)
        entry.admitted += count
        if entry.admitted == entry.request.n:
            self.waiting.popleft()
        if followers:
            self._followers[row] = followers
        self._start_prefill(row)
        return row

    def _should_wait_for_prefix(self, row: int) -> bool:
        """Return whether `row` should wait because another row is computing much of the same prompt."""
        chain = self._block_digests(row, int(self.sequences.length[row]) - 1)
        index = self.pools.count_cached_columns(chain) + _MIN_SHARED_BLOCKS - 1
        if index >= len(chain):
            return False
        for other in self.prefilling:
            others = self._block_digests(other, int(self.sequences.length[other]))
            if index < len(others) and others[index] == chain[index]:  # then all blocks before are equal too
                self._steps_since_refill = _REFILL_WAIT_STEPS
                return True
        return False

    def _has_room(self, row: int, followers: int) -> bool:
        """Return whether the cache has room for `row`, one block per follower, and the decoding reserve."""
        if not len(self.decoding) and not self.prefilling:
            return True
        length = int(self.sequences.length[row])
        spare = followers + len(self.decoding) // _RESERVE_DIVISOR
        digests = self._block_digests(row, length - 1)  # the last token is always computed
        if self.pools.has_room(digests, length + 1, self.token_budget, spare):
            return True
        self._refused_with = self.pools.available
        return False

    def _start_prefill(self, row: int) -> None:
        """Start the prefill of a sample at the end of its cached prefix."""
        sequences = self.sequences
        blocks = self.pools.acquire_prefix(self._block_digests(row, int(sequences.length[row]) - 1))
        columns, cached = blocks.shape[1], blocks.shape[1] * self.pools.block_size
        sequences.blocks[:, row, :columns] = blocks
        sequences.num_blocks[row], sequences.computed[row] = columns, cached
        sequences.released_columns[:, row] = self.pools.window_starts(cached)
        sequences.stale[row] = False
        self.counters.cached_tokens += cached
        if sequences.length[row] == sequences.prompt_length[row]:
            sequences.cached[row] = cached
        self.prefilling.append(row)
        self.prefilling.sort(key=sequences.arrival.__getitem__)

    def _block_digests(self, row: int, length: int) -> list[bytes]:
        """Return the digests of the full blocks of the first `length` tokens."""
        entry = self.sequences.entries[row]
        assert entry is not None
        return entry.block_digests(self.version, self.sequences.tokens[row, :length], self.pools.block_size)

    def _build_step(self, chunks: list[tuple[int, int]], proposals: list[Proposal]) -> Step:
        """Build the step: one token of each decoding sample, then those with drafts, then the chunks."""
        sequences, decoding = self.sequences, self.decoding
        if proposals:
            decoding = decoding[~np.isin(decoding, [proposal.row for proposal in proposals])]
        tokens = sequences.last_tokens(decoding).astype(np.int64)
        positions = sequences.length[decoding] - 1
        count = len(decoding)
        if not chunks and not proposals:
            tables = sequences.blocks[:, decoding, : int(sequences.num_blocks[decoding].max())]
            order = _arange(count + 1)
            adapters = self._adapters_of(decoding)
            inputs = self._inputs_of(decoding)
            batch = StepBatch(tokens, positions, order, count, tables, order[:-1], adapters, inputs)
            return Step(batch, decoding, None, chunks, proposals)

        fed = [*self._draft_inputs(proposals), *self._prefill_inputs(chunks)]
        rows = np.concatenate([decoding, [row for row, _, _ in fed]])
        ends = count + np.cumsum([len(tokens) for _, _, tokens in fed])
        drawing, logits_of, logit_rows = decoding.tolist(), list(range(count)), list(range(count))
        for proposal, end in zip(proposals, ends.tolist(), strict=False):
            proposal.logits = len(logit_rows)
            drawing.append(proposal.row)
            logits_of.append(proposal.logits)
            logit_rows += range(end - 1 - len(proposal.tokens), end)
        for (row, start, new), end in zip(fed[len(proposals) :], ends[len(proposals) :], strict=True):
            if start + len(new) == sequences.length[row]:
                together = [row, *self._followers.get(row, [])]
                drawing += together
                logits_of += [len(logit_rows)] * len(together)
                logit_rows.append(end - 1)
        batch = StepBatch(
            np.concatenate([tokens, *(tokens for _, _, tokens in fed)]),
            np.concatenate([positions, *(np.arange(start, start + len(new)) for _, start, new in fed)]),
            np.concatenate([np.arange(count + 1), ends]),
            count,
            sequences.blocks[:, rows, : int(sequences.num_blocks[rows].max())],
            np.array(logit_rows, dtype=np.int64),
            self._adapters_of(rows),
            self._inputs_of(rows),
        )
        one_each = not proposals and len(logit_rows) == len(drawing)
        shared = None if one_each else np.array(logits_of, dtype=np.int64)
        return Step(batch, np.array(drawing, dtype=np.int64), shared, chunks, proposals)

    def _draft_inputs(self, proposals: list[Proposal]) -> Iterator[SequenceInputs]:
        for proposal in proposals:
            last = int(self.sequences.length[proposal.row]) - 1
            token = self.sequences.tokens[proposal.row, last]
            yield proposal.row, last, np.concatenate([[token], proposal.tokens])

    def _prefill_inputs(self, chunks: list[tuple[int, int]]) -> Iterator[SequenceInputs]:
        for row, count in chunks:
            start = int(self.sequences.computed[row])
            yield row, start, self.sequences.tokens[row, start : start + count].astype(np.int64)

    def _adapters_of(self, rows: Rows) -> NDArray[np.int32] | None:
        numbers: NDArray[np.int32] = self.sequences.adapter[rows]
        return numbers if numbers.max(initial=-1) >= 0 else None

    def _inputs_of(self, rows: Rows) -> list[InputEmbeddings | None] | None:
        if not self.sequences.embedded[rows].any():
            return None
        entries = [self.sequences.entries[row] for row in rows.tolist()]
        return [None if entry is None else entry.request.inputs for entry in entries]

    # -- results -----------------------------------------------------------------------------------------

    def commit(
        self, step: Step, tokens: NDArray[np.int64], logprobs: NDArray[np.float32], version: int
    ) -> tuple[Blocks, Blocks]:
        """Append the sampled tokens int64[D] to `step.rows`, all of which decode from the next step on.

        Returns:
            Source and target blocks int32[W, C] to copy before the next step.
        """
        sequences = self.sequences
        copies: list[tuple[Blocks, Blocks]] = []
        unplaced: list[int] = []
        for row, fed in step.chunks:
            sequences.computed[row] += fed
            self.counters.prompt_tokens += fed
            self._cache_blocks(row)  # before `release_outside_windows` releases blocks
            if sequences.computed[row] == sequences.length[row]:
                self.prefilling.remove(row)
                unplaced += self._fork(row, copies)
        self.append(step.rows, tokens, logprobs, version)
        self.decoding = step.rows
        if unplaced:
            sequences.computed[unplaced] = 0
            self.decoding = step.rows[~np.isin(step.rows, unplaced)]
            self.preempted = sorted([*self.preempted, *unplaced], key=sequences.arrival.__getitem__)
        running = np.concatenate([self.decoding, np.array(self.prefilling, dtype=np.int64)])
        self.pools.release_outside_windows(sequences, running)
        empty = np.zeros((len(self.pools.windows), 0), dtype=np.int32)
        sources, targets = zip((empty, empty), *copies, strict=True)
        return np.concatenate(sources, axis=1), np.concatenate(targets, axis=1)

    def append(
        self, rows: Rows, tokens: NDArray[np.int64], logprobs: NDArray[np.float32], version: int
    ) -> None:
        """Append the next token of each of `rows`; all earlier tokens are in the cache."""
        self.counters.sampled_tokens += len(rows)
        self.sequences.append(rows, tokens, logprobs, version)

    def _fork(self, row: int, copies: list[tuple[Blocks, Blocks]]) -> list[int]:
        """Share the blocks of the prompt of `row` with its followers.

        If the last block is not full, each follower gets a copy of it, which is added to `copies`. Return the
        followers for which no block was free. They compute the prompt themselves, like preempted samples.
        """
        followers = self._followers.pop(row, [])
        if not followers:
            return []
        sequences = self.sequences
        length, table = int(sequences.length[row]), sequences.table(row)
        full = length // self.pools.block_size
        columns = table.shape[1]
        if full < columns:
            placed = followers[: self.pools.num_available]
            targets = self.pools.allocate(len(placed))
            sequences.blocks[:, placed, full] = targets
            copies.append((np.repeat(table[:, full:], len(placed), axis=1), targets))
        else:
            placed = followers
        self.pools.share(table[:, :full], len(placed))
        sequences.blocks[:, placed, :full] = table[:, None, :full]
        sequences.num_blocks[placed] = columns
        sequences.computed[placed] = length
        sequences.stale[placed] = sequences.stale[row]
        sequences.released_columns[:, placed] = sequences.released_columns[:, [row]]
        return followers[len(placed) :]

    def _cache_blocks(self, row: int) -> None:
        """Add the full blocks of `row` to the prefix cache."""
        self._refused_with = ()
        if self.sequences.stale[row]:
            return
        digests = self._block_digests(row, int(self.sequences.computed[row]))
        self.pools.insert(self.sequences.table(row), digests)

    def allocate_temporarily(self, count: int) -> Blocks:
        """Allocate int32[W, count] blocks for scoring. The caller frees them before the next step."""
        while (blocks := self.pools.allocate_temporarily(count)) is None:
            self._preempt(self._latest_row())
        return blocks

    # -- preemption --------------------------------------------------------------------------------------

    def _latest_row(self) -> int:
        """Return the running sample that arrived last."""
        rows = np.concatenate([self.decoding, np.array(self.prefilling, dtype=np.int64)])
        return int(rows[self.sequences.arrival[rows].argmax()])

    def _preempt(self, row: int, *, cache_blocks: bool = True) -> None:
        """Release the blocks of a running sample, and queue it to be recomputed.

        Without `cache_blocks`, its blocks do not enter the prefix cache, and no preemption is counted: the
        weights changed.
        """
        if cache_blocks:
            self._cache_blocks(row)
            self.counters.preemptions += 1
        self._stop_running(row)
        self._release_blocks(row)
        self.preempted = sorted([*self.preempted, row], key=self.sequences.arrival.__getitem__)

    def _stop_running(self, row: int) -> None:
        self._refused_with = ()
        if row in self.prefilling:
            self.prefilling.remove(row)
        else:
            self.decoding = self.decoding[self.decoding != row]

    def _release_blocks(self, row: int, returns_in: float = 0.0) -> None:
        self.pools.release(self.sequences.table(row), returns_in)
        self.sequences.num_blocks[row] = self.sequences.computed[row] = 0
        self.sequences.released_columns[:, row] = 0


_ARANGE = np.arange(4097)


def _arange(count: int) -> NDArray[np.int64]:
    return _ARANGE[:count] if count <= len(_ARANGE) else np.arange(count)
