"""Measure the prefix cache for agents that pause: hits by eviction rule, tokens per second with offloading.

    python benchmarks/prefix_cache.py [--model FOLDER] [--sessions 200] [--turns 20] [--hits]

`--model` is a Hugging Face folder for the second part, such as that of `perilune model fetch smollm2-135m`.
By default, that part uses a random model of the same shape. Writes results/prefix_cache.json. `--hits`
measures only the first part, and keeps the results of the second.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perilune.engine.blocks import BLOCK, NULL_BLOCK, Blocks, blocks_for
from perilune.engine.engine import Engine
from perilune.engine.offload import OffloadSettings, OffloadStore
from perilune.engine.pools import BlockPools
from perilune.engine.request import Prompt, SamplingParams
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.decoder import Decoder
from perilune.models.transformers_model import load_for_inference
from plain_lru import PlainLru
from recipe_runs import document, options, write

SYSTEM = 512  # tokens that all sessions share
ANSWER = 64  # tokens of each answer
LONGEST_PAUSE = 60.0
CHUNK = 1024  # tokens of a prompt computed at once
WINDOW = 512
SHARE = 4  # the pools hold a quarter of the working set
UNLIMITED = 1 << 20
MODELS = {"full attention": (None,), "5 windows of 512 to 1 full": (None, WINDOW)}
LAYERS = {None: 1, WINDOW: 5}
STORES = {"store of a quarter": 0.25, "store of half": 0.5, "store of three quarters": 0.75}


@dataclass(frozen=True)
class Turn:
    """A request with `length` tokens in its prompt, and the pause after its answer."""

    at: float
    session: int
    length: int
    pause: float


def main() -> None:
    parser = options(__doc__, "prefix_cache")
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--hits", action="store_true", help="measure only the hits, and keep the rest")
    arguments = parser.parse_args()
    began = time.monotonic()
    seeds = arguments.seeds or [0, 1, 2]
    hits = [row for name in MODELS for row in rules(name, seeds, arguments)]
    about = {"title": "Prefix cache: hits of agents that pause", "about": ABOUT}
    if arguments.hits:
        known = json.loads(arguments.out.read_text(encoding="utf-8"))
        known.pop("minutes", None)  # of both parts
        write(arguments.out, known | about | {"hits": hits})
        return
    speed = [offloading(arguments.model)]
    write(
        arguments.out,
        about | {"hits": hits, "offloading": speed} | document("prefix_cache.py", sys.argv[1:], began),
    )


ABOUT = f"""\
**Hits.** The first part simulates conversations of 20 turns, with pauses of 0 to {LONGEST_PAUSE:.0f} seconds
of virtual time between turns. It uses the block pools of the engine. All conversations share {SYSTEM} tokens.
Each turn adds 16 to 128 tokens and an answer of {ANSWER}. The pools have space for a quarter of the tokens of
all complete conversations.

* *Share of hits* is the share of the prompt tokens that are found in the cache.
* *Plain LRU* evicts the least recently released block first. An earlier version of the engine did this. *Tail
  rule* is the present rule, which evicts whole branches. *Unlimited* has pools for all blocks.
* The *stores* also keep evicted blocks in host memory. The size of a store is a share of the bytes of all
  complete conversations, which in layers with windows keep their last window. The *unlimited store* keeps
  every evicted block, so that its hits equal those of unlimited pools.
* In *announced*, requests give the length of the pause. In *announced 30 s*, they always say 30 seconds.
* *Unusable blocks* are cached blocks from which no request can continue, counted every 100 turns. The table
  gives the largest count.

**Offloading.** The second part runs conversations in turn on the engine itself. The pool has space for a
quarter of their tokens, and the host memory for all. The samples are bit-identical with and without
offloading. *Predicted seconds* is the time without offloading, minus the time to compute the loaded tokens,
plus the time to copy the moved bytes. The rates for this prediction come from a separate measurement with
other prompts. Offloading is faster than computing if bytes are copied faster than the *break-even* rate.
Times are CPU seconds of one thread."""


def rules(name: str, seeds: Sequence[int], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    windows = MODELS[name]
    by_rule: dict[str, list[tuple[float, int]]] = {}
    for seed in seeds:
        turns = trace(arguments.sessions, arguments.turns, seed)
        lengths = {turn.session: turn.length + ANSWER for turn in turns}.values()
        for rule, run in rule_runs(complete_blocks(lengths, windows), windows).items():
            by_rule.setdefault(rule, []).append(run(turns))
            print(name, seed, rule, *by_rule[rule][-1], flush=True)
    best = statistics.mean(share for share, _ in by_rule["unlimited"])
    plain = statistics.mean(share for share, _ in by_rule["plain LRU"])
    for rule, results in by_rule.items():
        mean = statistics.mean(share for share, _ in results)
        yield {
            "model": name,
            "rule": rule,
            "share of hits": [round(share, 4) for share, _ in results],
            "hits / hits of unlimited": round(mean / best, 3),
            "hits / hits of plain LRU": round(mean / plain, 2),
            "unusable blocks": max(lost for _, lost in results),
        }


def complete_blocks(lengths: Iterable[int], windows: tuple[int | None, ...]) -> list[int]:
    """Blocks of complete conversations in each pool."""
    return [sum(blocks_for(min(length, window or length)) for length in lengths) for window in windows]


def rule_runs(
    complete: list[int], windows: tuple[int | None, ...]
) -> dict[str, Callable[[list[Turn]], tuple[float, int]]]:
    """Functions by rule that compute the share of hits and the most unusable blocks of a trace.

    Args:
        complete: blocks of all complete conversations in each pool.
    """
    counts = [
        count // SHARE + (0 if window is None else blocks_for(CHUNK))
        for count, window in zip(complete, windows, strict=True)
    ]
    contents = NoContents([BLOCK * LAYERS[window] for window in windows])
    whole = sum(count * size for count, size in zip(complete, contents.sizes, strict=True))

    def ours(told: Callable[[Turn], float], *, store: int = 0, unlimited: bool = False) -> Any:
        def run(turns: list[Turn]) -> tuple[float, int]:
            clock = Clock()
            offload = OffloadStore(OffloadSettings(store, always=True), contents) if store else None
            sizes = [UNLIMITED] * len(windows) if unlimited else counts
            return replay(BlockPools(sizes, windows, lambda: clock.now, offload), turns, clock, told)

        return run

    return {
        "plain LRU": lambda turns: replay(PlainLru(counts, windows), turns, Clock(), lambda turn: 0.0),
        "tail rule": ours(lambda turn: 0.0),
        "announced 30 s": ours(lambda turn: LONGEST_PAUSE / 2),
        "announced": ours(lambda turn: turn.pause),
        **{rule: ours(lambda turn: 0.0, store=round(share * whole)) for rule, share in STORES.items()},
        "unlimited store": ours(lambda turn: 0.0, store=UNLIMITED * sum(contents.sizes)),
        "unlimited": ours(lambda turn: 0.0, unlimited=True),
    }


def trace(sessions: int, turns: int, seed: int) -> list[Turn]:
    """Turns by time. A turn begins after the previous turn of its session and a pause."""
    rng = np.random.default_rng(seed)
    requests = []
    for session in range(sessions):
        start, length = float(rng.uniform(0, LONGEST_PAUSE)), SYSTEM
        for _ in range(turns):
            length += int(rng.integers(16, 129))
            pause = float(rng.uniform(0, LONGEST_PAUSE))
            requests.append(Turn(start, session, length, pause))
            start, length = start + pause, length + ANSWER
    return sorted(requests, key=lambda turn: turn.at)


class Clock:
    """Virtual time."""

    now = 0.0


@dataclass(frozen=True)
class NoContents:
    """Blocks of arbitrary bytes, as many as `sizes` says for each pool."""

    sizes: list[int]

    def read(self, index: int, blocks: Blocks) -> NDArray[np.uint8]:
        return np.zeros((len(blocks), self.sizes[index]), dtype=np.uint8)

    def write(self, index: int, blocks: Blocks, content: NDArray[np.uint8]) -> None: ...


def replay(pools: Any, turns: list[Turn], clock: Clock, told: Callable[[Turn], float]) -> tuple[float, int]:
    """The share of cached prompt tokens, and the largest number of unusable blocks."""
    cached = total = lost = 0
    for number, turn in enumerate(turns):
        clock.now = turn.at
        names = chain(turn, turn.length + ANSWER)
        table = pools.acquire_prefix(names[: (turn.length - 1) // BLOCK])
        done = table.shape[1] * BLOCK
        cached += done
        total += turn.length
        for stop in (*range(done + CHUNK, turn.length, CHUNK), turn.length, turn.length + ANSWER):
            table = np.concatenate([table, pools.allocate(blocks_for(stop) - table.shape[1])], axis=1)
            pools.insert(table, names[: stop // BLOCK])
            for index, behind in enumerate(pools.window_starts(stop)):
                pools.tree.release(index, table[index, :behind])
                table[index, :behind] = NULL_BLOCK
        pools.release(table, told(turn))
        if number % 100 == 0:
            lost = max(lost, int(pools.unusable()) if isinstance(pools, PlainLru) else unusable(pools))
    return cached / total, lost


def chain(turn: Turn, length: int) -> list[bytes]:
    """Names of the full blocks of a conversation."""
    shared = SYSTEM // BLOCK
    return [
        b"%d/%d" % (0 if column < shared else turn.session + 1, column) for column in range(length // BLOCK)
    ]


def unusable(pools: BlockPools) -> int:
    """Number of cached blocks without a window from which no end of a prefix can be reached."""
    tree = pools.tree
    ends = [node for node in tree._nodes.values() if node.heap_entry] + list(tree._forks)
    usable = set()
    for end in ends:
        node: Any = end
        while node is not None and id(node) not in usable:
            usable.add(id(node))
            node = node.parent
    return sum(id(node) not in usable for node in tree._nodes.values())


def offloading(folder: Path | None) -> dict[str, Any]:
    """Measured and predicted seconds of the same conversations, with and without offloading."""
    if folder is None:
        config = DecoderConfig("llama", 4096, 576, 1536, 30, 9, 3, 64)
        model: Any = Decoder(config)
        model.initialize(0)
    else:
        model, _ = load_for_inference(folder, "cpu")
    sessions, turns, added, answer = 6, 4, 192, 8
    longest = turns * (added + answer)
    pool = sessions * longest // SHARE + BLOCK

    def run(settings: OffloadSettings | None) -> tuple[float, list[list[int]], Engine]:
        engine = Engine(model, slots=2, cache_tokens=max(pool, longest + BLOCK))
        if settings is not None:
            engine.offload(settings)
        rng = np.random.default_rng(0)
        histories: list[list[int]] = [[] for _ in range(sessions)]
        began = time.process_time()
        for turn in range(turns):
            for session in range(sessions):
                history = histories[session]
                history += rng.integers(5, 4000, added).tolist()
                prompt = Prompt(history, (0, turn, session))
                ((sample,),) = engine.sample([prompt], 1, SamplingParams(answer, min_tokens=answer))
                history += sample.token_ids.tolist()
        return time.process_time() - began, histories, engine

    per_token, per_byte, block = rates(model)
    plain, expected, without = run(None)
    offloaded, sampled, engine = run(OffloadSettings(8 << 30, always=True))
    assert sampled == expected, "offloading changed a sample"
    spared = without.counters.prompt_tokens - engine.counters.prompt_tokens
    moved = engine.offloaded.loaded_from_memory + engine.offloaded.stored
    predicted = plain - spared * per_token + moved * block * per_byte
    total = sessions * turns * (added + answer)
    return {
        "model": "random, of the shape of SmolLM2-135M" if folder is None else folder.name,
        "conversations": sessions,
        "turns": turns,
        "seconds without offloading": round(plain, 2),
        "seconds with offloading": round(offloaded, 2),
        "predicted seconds": round(predicted, 2),
        "error of the prediction": f"{100 * (predicted / offloaded - 1):+.1f}%",
        "new tokens per second, without offloading": round(total / plain),
        "new tokens per second, with offloading": round(total / offloaded),
        "prompt tokens not computed": spared,
        "break-even, GB/s": round(block / BLOCK / per_token / 1e9, 4),
        "measured copy, GB/s": round(1e-9 / per_byte, 2),
    }


def rates(model: Any) -> tuple[float, float, int]:
    """CPU seconds per prompt token, seconds per copied byte, and bytes of a block."""
    engine = Engine(model, slots=2, cache_tokens=1024)
    rng = np.random.default_rng(1)
    seconds = []
    for repeat in range(3):
        prompt = Prompt(rng.integers(5, 4000, 400).tolist(), (1, repeat, 0))
        began = time.process_time()
        engine.sample([prompt], 1, SamplingParams(1))
        seconds.append((time.process_time() - began) / 400)
    contents: Any = engine._runner
    blocks = np.arange(1, 33, dtype=np.int32)
    began = time.process_time()
    for _ in range(5):
        content = contents.cache.read(0, blocks)
        contents.cache.write(0, blocks, content)
    copied = (time.process_time() - began) / (2 * 5 * content.nbytes)
    return statistics.median(seconds), copied, content.shape[1]


if __name__ == "__main__":
    main()
