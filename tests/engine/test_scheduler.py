"""The scheduler with a simulated model: no leaked blocks, no starved requests, scheduling order."""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from perilune.engine.blocks import NULL_BLOCK, blocks_for
from perilune.engine.pools import BlockPools
from perilune.engine.request import Request, SamplingParams
from perilune.engine.scheduler import Scheduler
from perilune.engine.sequences import Entry, Sequences
from perilune.engine.step import Counters, Step
from perilune.models.memory import max_blocks_touched, window_blocks


class Life:
    """A scheduler with a simulated model that samples random tokens, and checks of its invariants."""

    def __init__(
        self, rows: int, blocks: int, budget: int, seed: int, windows: tuple[int | None, ...] = (None,)
    ) -> None:
        self.rng = random.Random(seed)
        self.sequences = Sequences(rows, 100, len(windows))
        sizes = [window_blocks(size, blocks + 1, slots=rows, token_budget=budget) for size in windows]
        self.pools = BlockPools(sizes, windows)
        self.scheduler = Scheduler(self.sequences, self.pools, budget, Counters())
        self.entries: dict[int, Entry] = {}
        self.finished: dict[int, list[int]] = {}
        self.stored: list[dict[tuple[int, int], int]] = [{} for _ in windows]  # token by block and offset

    def add(self, prompt: list[int], n: int, max_tokens: int) -> Entry:
        entry = Entry(len(self.entries), Request(prompt, SamplingParams(max_tokens), n=n),
                      np.array(prompt, dtype=np.int32), n)  # fmt: skip
        self.entries[entry.id] = entry
        self.finished[entry.id] = []
        self.scheduler.add(entry)
        return entry

    def step(self) -> Step | None:
        step = self.scheduler.schedule()
        if step is None:
            return None
        self.run(step)
        tokens = np.array([self.rng.randrange(50) for _ in step.rows], dtype=np.int64)
        copies = self.scheduler.commit(step, tokens, np.zeros(len(tokens), dtype=np.float32), 0)
        for stored, sources, targets in zip(
            self.stored, *(blocks.tolist() for blocks in copies), strict=True
        ):
            for source, target in zip(sources, targets, strict=True):
                stored |= {(target, offset): stored.get((source, offset), -1) for offset in range(16)}
        sequences = self.sequences
        for row in step.rows.tolist():
            entry = sequences.entries[row]
            assert entry is not None
            if sequences.length[row] == sequences.limit[row] or self.rng.random() < 0.05:
                self.finished[entry.id].append(int(sequences.sample[row]))
                self.scheduler.release(row, cache_blocks=self.rng.random() < 0.5)
                entry.unfinished -= 1
        return step

    def run(self, step: Step) -> None:
        """Store the fed tokens; then each sequence must find all of its tokens in its blocks."""
        batch = step.batch
        assert len(batch.token_ids) <= self.scheduler.token_budget
        chunked = [row for row, _ in step.chunks]
        order = [*(row for row in step.rows.tolist()[: batch.decodes]), *chunked]
        for index, row in enumerate(order):
            fed = slice(batch.cu_seqlens[index], batch.cu_seqlens[index + 1])
            assert fed.stop > fed.start
            first, last = int(batch.positions[fed][0]), int(batch.positions[fed][-1])
            for table, window, pool, stored in zip(
                batch.block_tables[:, index].tolist(), self.pools.windows, self.pools.pools, self.stored,
                strict=True,
            ):  # fmt: skip
                for token, position in zip(batch.token_ids[fed], batch.positions[fed].tolist(), strict=True):
                    block = table[position // 16]
                    assert pool.references[block] == 1, "written where others read"
                    stored[block, position % 16] = int(token)
                for position in range(max(0, first - (window or 10**6) + 1), last + 1):
                    value = stored[table[position // 16], position % 16]
                    assert value == self.sequences.tokens[row, position]

    def check(self) -> None:
        """Reference counts match the block tables, and no sample holds more blocks than it needs."""
        sequences, decoding = self.sequences, self.scheduler.decoding.tolist()
        for index, (window, pool) in enumerate(zip(self.pools.windows, self.pools.pools, strict=True)):
            references = np.zeros(pool.count, dtype=np.int64)
            for row, entry in enumerate(sequences.entries):
                if entry is not None:
                    table = sequences.table(row)[index]
                    blocks = table[table != NULL_BLOCK]
                    references[blocks] += 1
                    assert len(table) <= blocks_for(int(sequences.length[row]))
                    assert window is not None or len(blocks) == len(table)
                    assert window is None or row not in decoding or len(blocks) <= max_blocks_touched(window)
            assert np.array_equal(pool.references, references)
            assert pool.num_used == (references > 0).sum()


def random_turns(life: Life, blocks: int) -> Iterator[Step | None]:
    """Add, remove and step at random; yield the step of each turn."""
    rng = life.rng
    prefixes = [[rng.randrange(50) for _ in range(40)] for _ in range(3)]
    for turn in range(1200):
        kind, step = rng.random(), None
        if kind < 0.25 and len(life.scheduler.waiting) < 5:
            prompt = rng.choice(prefixes)[: rng.randint(1, 40)] + [
                rng.randrange(50) for _ in range(rng.randint(0, 9))
            ]
            life.add(prompt, rng.randint(1, 6), rng.randint(1, 60))
        elif kind < 0.28:
            living = [entry for entry in life.entries.values() if entry.unfinished]
            if living:
                entry = rng.choice(living)
                life.scheduler.remove(entry)
                entry.unfinished = 0
        elif kind < 0.29:
            life.scheduler.switch_weights(turn, recompute=rng.random() < 0.5)
        elif kind < 0.30:
            life.pools.free_temporary(life.scheduler.allocate_temporarily(rng.randint(1, blocks)))
        else:
            step = life.step()
        yield step


@pytest.mark.parametrize(
    ("rows", "blocks", "budget", "windows"),
    [(12, 30, 40, (None,)), (6, 20, 200, (None,)), (4, 12, 16, (None, 20))],
)
def test_refused_samples_are_tried_again_as_soon_as_they_fit(
    rows: int, blocks: int, budget: int, windows: tuple[int | None, ...]
) -> None:
    def steps(always: bool) -> list[tuple[int, list[int], list[tuple[int, int]]] | None]:
        life, found = Life(rows, blocks, budget, seed=2, windows=windows), []
        for step in random_turns(life, blocks):
            found.append(step and (step.batch.decodes, step.rows.tolist(), step.chunks))
            if always:
                life.scheduler._refused_with = ()
        return found

    assert steps(always=False) == steps(always=True)


@pytest.mark.parametrize("windows", [(None,), (20,), (None, 20)])
@pytest.mark.parametrize(("rows", "blocks", "budget"), [(4, 12, 16), (12, 30, 40), (16, 200, 64)])
def test_random_requests_leak_no_block_and_all_finish(
    rows: int, blocks: int, budget: int, windows: tuple[int | None, ...]
) -> None:
    life = Life(rows, blocks, budget, seed=rows, windows=windows)
    for _ in random_turns(life, blocks):
        life.check()
    counters = life.scheduler.counters
    assert counters.cached_tokens > 0
    assert counters.preemptions > 0
    while life.step() is not None:
        life.check()
    assert not life.scheduler.unfinished
    assert life.pools.used_share == 0
    assert sorted(life.scheduler._free_rows) == list(range(rows))
    for entry in life.entries.values():
        assert entry.unfinished == 0
        samples = life.finished[entry.id]
        assert len(set(samples)) == len(samples) <= entry.request.n


def drain(life: Life) -> list[Step]:
    steps = []
    while (step := life.step()) is not None:
        steps.append(step)
    return steps


def never_stop_early(life: Life) -> None:
    life.rng.random = lambda: 1.0  # type: ignore[method-assign]


def test_oldest_request_is_never_preempted() -> None:
    life = Life(4, 8, 64, seed=0)
    never_stop_early(life)
    first, second = life.add([1] * 30, 1, 60), life.add([2] * 30, 1, 60)
    seen: list[int] = []
    while (step := life.step()) is not None:
        seen += [int(life.sequences.length[row]) for row in step.rows if life.sequences.entries[row] is first]
    assert seen == list(range(31, 90))  # never preempted; the row is already released after its last step
    assert life.finished == {first.id: [0], second.id: [0]}
    assert life.scheduler.counters.preemptions >= 1


def test_decoding_continues_during_chunked_prefill() -> None:
    life = Life(4, 100, 32, seed=0)
    never_stop_early(life)
    short = life.add([1] * 4, 2, 60)
    life.step()
    life.add([3] * 200, 1, 5)
    for _ in range(6):
        step = life.step()
        assert step is not None
        assert step.batch.decodes == 2
        assert [count for _, count in step.chunks] == [30]
    step = life.step()
    assert step is not None
    assert [count for _, count in step.chunks] == [20]
    assert len(step.rows) == 3
    assert short.unfinished == 2


def test_group_feeds_its_prompt_once_and_shares_full_blocks() -> None:
    life = Life(16, 100, 100, seed=0)
    never_stop_early(life)
    life.add(list(range(37)), 16, 20)
    step = life.step()
    assert step is not None
    assert len(step.batch.token_ids) == 37
    assert len(step.rows) == 16
    assert len(step.batch.logit_rows) == 1
    assert (
        life.pools.pools[0].num_used == 2 + 16
    )  # two shared full blocks, and a copy of the third for each sample
    drain(life)
    assert life.scheduler.counters.prompt_tokens == 37


def test_cached_prefix_is_not_fed_again() -> None:
    life = Life(16, 100, 100, seed=0)
    never_stop_early(life)
    life.add([7] * 50, 1, 20)
    drain(life)
    life.add([7] * 50 + [8], 1, 2)
    step = life.step()
    assert step is not None
    assert len(step.batch.token_ids) == 51 - 48
    life.add([7] * 48, 1, 2)  # the last token is always fed, because its logits are needed
    step = life.step()
    assert step is not None
    assert step.chunks[0][1] == 16
    drain(life)
    life.scheduler.switch_weights(1, recompute=True)
    life.add([7] * 50, 1, 2)
    step = life.step()
    assert step is not None
    assert len(step.batch.token_ids) == 50


def test_equal_prompts_wait_for_the_first_to_be_computed() -> None:
    life = Life(16, 100, 400, seed=0)
    never_stop_early(life)
    for ending in ([8], [9], [8]):
        life.add([7] * 100 + ending, 1, 20)
    life.add([1] * 5, 1, 20)  # a later request keeps its place in the queue
    fed = []
    for _ in range(3):
        step = life.step()
        assert step is not None
        fed.append([count for _, count in step.chunks])
    assert fed == [[101], [5, 5, 5], []]
    drain(life)
    short = Life(16, 100, 400, seed=0)
    for ending in ([8], [9]):
        short.add([7] * 63 + ending, 1, 2)
    step = short.step()
    assert step is not None
    assert [count for _, count in step.chunks] == [64, 64]  # the shared prefix is too short to wait for


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_sample_wastes_less_than_one_block(length: int) -> None:
    life = Life(8, 200, 400, seed=0)
    never_stop_early(life)
    for index in range(8):
        life.add([index] * length, 1, 70)
    wasted = []
    for _ in range(60):
        life.step()
        capacity = life.sequences.num_blocks * 16
        wasted.append((capacity - life.sequences.computed).max())
    assert max(wasted) == 15


def test_blocks_outside_the_window_are_freed() -> None:
    life = Life(4, 100, 64, seed=0, windows=(None, 32))
    never_stop_early(life)
    life.add([1] * 150, 4, 200)
    used = []
    while (step := life.step()) is not None:
        life.check()
        if not step.chunks:
            used.append([pool.num_used for pool in life.pools.pools])
    whole, of_window = np.array(used[:-1]).T
    # A query sees 32 tokens in at most three blocks, including the one being written.
    assert max(of_window) <= 4 * 3
    assert max(whole) == 9 + 4 * (blocks_for(349) - 9)  # the prompt's full blocks once
