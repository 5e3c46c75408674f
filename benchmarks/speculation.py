"""Compare tokens per second with and without speculation, by text, temperature and batch size.

    python benchmarks/speculation.py --model FOLDER [--tokens 48] [--repeats 1]

`--model` is the folder that `perilune model fetch smollm2-135m` writes. The benchmark checks that all arms
draw the same tokens. Writes results/speculation.json.
"""

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perilune.engine.engine import Engine
from perilune.engine.native_runner import NativeRunner
from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.engine.speculation import SpeculationSettings
from perilune.engine.step import StepBatch
from perilune.models.native.ops import WeightKind
from perilune.models.transformers_model import load_for_inference
from recipe_runs import document, options, write

ARMS = {
    "off": None,
    "lookup": SpeculationSettings("lookup"),
    "int8 draft": SpeculationSettings("draft"),
}
FORCED = {  # further arms of the largest batch
    "lookup, not adaptive": SpeculationSettings("lookup", adaptive=False),
    "int8 draft, not adaptive": SpeculationSettings("draft", tokens=4, adaptive=False),
}
ROWS = (1, 2, 4, 8, 12, 16, 32, 64)
KINDS: tuple[WeightKind, ...] = ("float32", "int8")
POSITION = 256  # position of the tokens in the timed steps
PYTHON = """\
def read_orders(path):
    orders = []
    with open(path) as lines:
        for line in lines:
            number, name, count, price = line.strip().split(",")
            orders.append({"number": int(number), "name": name, "count": int(count), "price": float(price)})
    return orders


def total_price(orders):
    total = 0.0
    for order in orders:
        total += order["count"] * order["price"]
    return total


def largest_order(orders):
    largest = None
    for order in orders:
        if largest is None or order["count"] * order["price"] > largest["count"] * largest["price"]:
            largest = order
    return largest
"""
PASSAGE = """\
The Luna 3 probe was launched on 4 October 1959 from the Baikonur Cosmodrome. It was the third spacecraft \
to reach the neighborhood of the Moon, and the first to send photographs of its far side, which had never \
been seen before. The probe passed about 6,200 kilometers above the southern pole of the Moon and then \
took 29 photographs over 40 minutes, covering 70 percent of the far side. The film was developed, fixed \
and dried on board, and then scanned by a beam of light that a photomultiplier turned into an electric \
signal. Seventeen of the pictures were received on Earth by 18 October, when contact with the probe was \
lost. The pictures were of low quality, but they showed that the far side has mountains and few of the \
dark plains of the near side."""
TEXTS = {
    "code edit": "Rename the function total_price to order_total in this file. Answer with the whole file."
    f"\n\n```python\n{PYTHON}```",
    "quote": f"{PASSAGE}\n\nRepeat the sentences of this text that say how the pictures were taken and sent,"
    " word for word.",
    "summary": f"{PASSAGE}\n\nSummarize this text in four sentences.",
    "story": "Write a story about a lighthouse keeper who finds a letter in a bottle.",
}
BATCHES = {8: 2, 64: 4}  # number of samples: divisor of the length of their answers
BATCH_TEXTS = "code edit", "story"


@dataclass(frozen=True)
class Case:
    """`samples` samples of one text at a temperature."""

    text: str
    temperature: float
    samples: int

    @property
    def fields(self) -> dict[str, Any]:
        """The columns of its rows."""
        return {"samples": self.samples, "text": self.text, "temperature": self.temperature}


ABOUT = f"""\
The model samples in float32. The prompt *code edit* asks for a Python file with one name changed, *quote* for
sentences of a given text, *summary* for a summary of this text, and *story* for a story.

* The arm *lookup* proposes the tokens that followed an earlier occurrence of the last tokens.
* The arm *int8 draft* samples draft tokens from an int8 copy of the model.
* Both arms choose the number of draft tokens, up to 10, from the acceptance rate and the number of samples in
  the step. With 64 samples they propose none, because even accepted draft tokens cost more time than they
  save.
* The arms *not adaptive* always propose as many draft tokens as they can: *lookup* up to 10, and *int8 draft*
  up to 4.
* All arms sample the same tokens and log-probs, bit for bit.

The columns:

* *Tokens per CPU second* are sampled tokens, without the time of the prompt. *Speed / speed of off* is
  relative to the arm *off*, which does not speculate.
* *Tokens per step* is the mean number of tokens that a sample gets in a step.
* *Time of a step* is the time to compute several tokens of one sequence at position {POSITION}, with logits
  for all of them. A step of one token takes about as long as reading the weights. *Cost of a draft token* is
  the time that one more token adds, as a share of the time of a step of one token.

Each arm ran once, and the arms took turns, while other programs used the cores. Arms that propose no draft
tokens differ from *off* only by chance, so their ratios show how far a single measurement can be off."""
CASES = [
    *(Case(text, 0.0, 1) for text in TEXTS),
    *(Case(text, 0.7, samples) for samples in BATCHES for text in BATCH_TEXTS),
    *(Case(text, 0.7, 1) for text in TEXTS),
]


def main() -> None:
    parser = options(__doc__, "speculation")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    began = time.monotonic()
    torch.set_num_threads(1)
    model, tokenizer = load_for_inference(arguments.model, "cpu")
    prompts = {
        name: tokenizer.encode_prompt([{"role": "user", "content": text}]) for name, text in TEXTS.items()
    }
    result: dict[str, Any] = {
        "title": "Speculative decoding: speed by text and batch size",
        "time of a step": step_times(model),
        "one sample": [],
        "batches": [],
    }
    for case in CASES:
        forced = FORCED if case.samples == max(BATCHES) else {}
        rows = list(measure(model, prompts, case, ARMS | forced, arguments))
        result["one sample" if case.samples == 1 else "batches"] += rows
        write(
            arguments.out,
            result | {"about": ABOUT} | document("speculation.py", sys.argv[1:], began),
        )


def step_times(model: Any) -> list[dict[str, Any]]:
    """Milliseconds of a step by the number of its tokens."""
    rows = []
    for kind in KINDS:
        runner = NativeRunner(model, (64,), kind)
        seconds = {rows: min(_seconds(runner, rows) for _ in range(4)) for rows in ROWS}
        row: dict[str, Any] = {"weights": kind}
        row |= {
            f"{rows} token{'s' * (rows > 1)}, ms": round(1e3 * taken, 1) for rows, taken in seconds.items()
        }
        row["cost of a draft token"] = f"{100 * (seconds[8] - seconds[1]) / 7 / seconds[1]:.1f}%"
        rows.append(row)
    return rows


def _seconds(runner: NativeRunner, rows: int) -> float:
    tables = np.arange(1, 33, dtype=np.int32)[None, None]
    positions = np.arange(POSITION, POSITION + rows)
    batch = StepBatch(np.arange(rows) + 5, positions, np.array([0, rows]), 0, tables, np.arange(rows))
    began = time.process_time()
    runner.run(batch)
    return time.process_time() - began


def measure(
    model: Any, prompts: dict[str, list[int]], case: Case, arms: dict[str, Any], arguments: Any
) -> Iterator[dict[str, Any]]:
    """One row for each arm. The arms take turns."""
    engines = {arm: _engine(model, settings, case) for arm, settings in arms.items()}
    speeds: dict[str, list[float]] = {arm: [] for arm in arms}
    expected: list[Completion] = []
    for repeat in range(arguments.repeats if case.samples == 1 else 1):
        for arm, engine in engines.items():
            tokens = arguments.tokens // BATCHES.get(case.samples, 1)
            speed, samples = _speed(engine, prompts[case.text], case, tokens)
            speeds[arm].append(speed)
            expected = expected or samples
            assert [_bits(item) for item in samples] == [_bits(item) for item in expected], "samples differ"
            print(case, arm, repeat, round(speed, 1), engine.counters, flush=True)
    for arm, engine in engines.items():
        counters = engine.counters
        proposed = counters.proposed_tokens
        yield {
            **case.fields,
            "arm": arm,
            "tokens per CPU second": [round(speed, 1) for speed in speeds[arm]],
            "speed / speed of off": round(
                statistics.median(speeds[arm]) / statistics.median(speeds["off"]), 2
            ),
            "tokens per step": round(_per_step(counters), 2),
            "draft tokens accepted": f"{100 * counters.accepted_tokens / proposed:.0f}%" if proposed else "",
        }


def _per_step(counters: Any) -> float:
    """Mean tokens of a sample in a step that computes it."""
    return float(counters.sampled_tokens / (counters.sampled_tokens - counters.accepted_tokens))


def _engine(model: Any, settings: SpeculationSettings | None, case: Case) -> Engine:
    engine = Engine(model, slots=case.samples, cache_tokens=case.samples * 1024)
    if settings is not None:
        engine.speculate(settings)
    return engine


def _speed(engine: Engine, prompt: Sequence[int], case: Case, tokens: int) -> tuple[float, list[Completion]]:
    """Tokens per CPU second from the first step that only decodes, and the samples."""
    started: list[float] = []

    def note(finished: int, total: int) -> None:
        if not started:
            started.append(time.process_time())

    params = SamplingParams(tokens, case.temperature)
    (samples,) = engine.sample([Prompt(list(prompt), (0, 0, 0))], case.samples, params, note)
    seconds = time.process_time() - started[0]
    return sum(len(sample.token_ids) - 1 for sample in samples) / seconds, samples


def _bits(one: Completion) -> tuple[list[int], list[float]]:
    return one.token_ids.tolist(), one.logprobs.tolist()


if __name__ == "__main__":
    main()
