"""Compare `perilune simulate` with real runs: engine workloads, arriving requests, and RL stages of recipes.

    python benchmarks/simulation.py

The engine is calibrated for two models, with full attention and with windows, on random prompts of
equal length, but the workloads and recipes differ from them. The speed of a shared machine drifts within
minutes. So the engine is calibrated before the workloads run and again after them, and the simulation uses
the mean. Each simulation uses the tokens of the real run.
Run the benchmark on an idle machine. It takes about 25 minutes. Writes results/simulation.json.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from perilune.engine.engine import Engine
from perilune.engine.request import Request, SamplingParams
from perilune.files import read_json_lines
from perilune.metrics.training import STEP_PARTS
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder
from perilune.recipe.load import bundled_recipe
from perilune.simulate.calibrate import WARMUP_STEPS, Clock, measure_steps
from perilune.simulate.engine import SimulatedEngine, SimulatedModel, StepLog
from perilune.simulate.recording import RecordedEngine
from perilune.simulate.step_cost import StepCost
from plan_accuracy import command
from recipe_runs import HERE, document, write

FULL = PRESETS["tiny"]
WINDOWS = FULL.replace(architecture="gemma3_text", windows=(64, 64, None))
REPEATS = 5  # real runs of a workload, of which the median counts
STAGE_REPEATS = 3  # of an RL stage
SLOTS, ROOM = 64, 64 * 320
ENGINE_SIZE = {"slots": SLOTS, "cache_tokens": ROOM}
LOADS = (0.5, 0.8, 0.95)  # of the requests that the engine can finish in a second
ARRIVALS = 300
STALENESS = {"synchronous": 0, "ahead_1": 1, "ahead_2": 2}
RECIPES: dict[str, tuple[str, ...]] = {
    "quickstart": ("rl.steps=40",),
    "calculator": (),
    "tools": ("sft.steps=100", "rl.steps=12"),
    "planning": ("traces.traces=6000", "sft.steps=200", "rl.steps=20"),
    "asynchronous": ("before.tasks=2", *(f"after_{name}.tasks=2" for name in STALENESS)),
}
WAIT = ("--wait-metric", "wait")  # which the environment records
ABOUT = """\
The simulator runs the engine's scheduler, pools and outputs, and predicts only times. It is calibrated on the
machine with prompts of equal length. The real runs are other workloads and recipes, on one thread of the same
machine.

* The speed of this shared machine drifts within minutes. So the engine was calibrated before the workloads
  and again after them, and the simulation of the workloads used the mean of both calibrations. The recipes
  were simulated with one calibration.
* The lengths of the answers are an input of the simulation: the lengths of the real run or, in the column
  *error before any run*, those of the demonstrations.
* An *error* is the prediction minus the measurement, divided by the measurement. The *spread* is the range of
  repeated real runs (maximum minus minimum), divided by their median. An error within the spread does not
  show a difference.
* *P99* is the 99th percentile of the latencies.
* *Beginning and end* is the time of a stage outside its steps. *Seconds of the command* is the elapsed time
  of `perilune simulate` for the whole recipe.
* *Age* is the number of updates between sampling an answer and training on it.

The workloads are not strictly held out. After a first comparison with them, we added three cases to the
calibration: requests without a group, steps that mix prefill with decoding, and attention to keys that the
samples of a group share."""


@dataclass(frozen=True)
class Workload:
    """Requests that are known from the start, and their engine.

    Attributes:
        turns: number of turns per sample. A later turn continues the earlier tokens with a few more.
    """

    name: str
    decoder: Decoder
    requests: Sequence[Request]
    size: dict[str, int]
    turns: int = 1


Known = dict[tuple[int, int, int], np.ndarray]  # tokens of each turn, request and sample
Times = dict[tuple[int, int, int], float]  # end of each turn, request and sample


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument(
        "--processor", action="store_true", help="measure processor time, to try it on a busy machine"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "simulation.json")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.processor else time.perf_counter
    began = time.monotonic()
    torch.set_num_threads(1)
    decoders = {name: new_decoder(config) for name, config in (("full", FULL), ("windows", WINDOWS))}
    fits: list[dict[str, Any]] = []
    before = calibrated(decoders, fits)
    played = [(workload, measured(workload, clock)) for workload in workloads(decoders)]
    arrived = list(arriving(decoders["full"], clock))
    after = calibrated(decoders, fits)
    costs = {name: mean_cost(before[name], after[name]) for name in decoders}
    closed = [compared(workload, run, costs) for workload, run in played]
    opened = [compared_arrivals(decoders["full"], run, costs["full"]) for run in arrived]
    with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as folder:
        home = Path(folder) / "home"
        stages = list(recipes(home, arguments.only)) if arguments.only else []
    result = report(closed, opened, stages) | {"calibration": fits}
    write(arguments.out, result | document("simulation.py", sys.argv[1:], began))


def new_decoder(config: Any) -> Decoder:
    decoder = Decoder(config)
    decoder.initialize(0)
    return decoder


def calibrated(decoders: dict[str, Decoder], fits: list[dict[str, Any]]) -> dict[str, StepCost]:
    """The measured cost of each decoder; adds rows about the measurements to `fits`."""
    costs = {}
    for name, decoder in decoders.items():
        started = time.monotonic()
        costs[name], error = measure_steps(decoder, 20.0, time.process_time)
        fits.append({"model": name, "seconds": time.monotonic() - started, "error of a step, %": 100 * error})
        print(fits[-1], flush=True)
    return costs


def mean_cost(before: StepCost, after: StepCost) -> StepCost:
    return StepCost({name: (before.seconds[name] + after.seconds[name]) / 2 for name in before.seconds})


# -- the engine ----------------------------------------------------------------------------------------------


def workloads(decoders: dict[str, Decoder]) -> Iterator[Workload]:
    """Five workloads whose shapes differ from those of the calibration."""
    full, size = decoders["full"], ENGINE_SIZE
    ragged = requests(1, 240, prompt=(5, 200), answer=(2, 90))
    groups = requests(2, 32, prompt=(8, 40), answer=(20, 60), samples=16)
    yield Workload("ragged", full, ragged, size)
    yield Workload("groups of 16", full, groups, {"slots": 256, "cache_tokens": 256 * 128})
    turns = requests(3, 24, prompt=(10, 60), answer=(5, 30), samples=4)
    yield Workload("four turns", full, turns, size, turns=4)
    long = requests(4, 80, prompt=(40, 250), answer=(20, 120))
    yield Workload("windows", decoders["windows"], long, size)
    yield Workload("preempting", full, ragged, {"slots": SLOTS, "cache_tokens": 16 * 200})
    yield Workload("thrash", full, ragged, {"slots": SLOTS, "cache_tokens": 16 * 60})


def requests(
    seed: int, count: int, *, prompt: tuple[int, int], answer: tuple[int, int], samples: int = 1
) -> list[Request]:
    """Random requests; lengths are uniform between the bounds, and equal within a group."""
    rng = np.random.default_rng(seed)
    vocabulary = FULL.vocab_size
    return [
        Request(
            rng.integers(vocabulary, size=int(rng.integers(*prompt))).tolist(),
            SamplingParams(int(rng.integers(*answer))),
            (seed, 0, number),
            samples,
        )
        for number in range(count)
    ]


@dataclass(frozen=True)
class Played:
    """Real runs of a workload.

    Attributes:
        known: the tokens of each turn, request and sample.
        seconds, tails: wall time and 99th percentile of the turns' ends, of each run.
        log: the steps of the last run.
    """

    known: Known
    seconds: Sequence[float]
    tails: Sequence[float]
    log: StepLog


def measured(workload: Workload, clock: Clock) -> Played:
    """Run a workload several times."""
    known = traced(workload)
    real = [
        play(RecordedEngine(workload.decoder, **workload.size), workload, known, clock)
        for _ in range(REPEATS + 1)
    ]
    seconds = [max(times.values()) for times, _ in real[1:]]  # the first allocates memory
    return Played(known, seconds, [tail(times) for times, _ in real[1:]], real[-1][1])


def compared(workload: Workload, real: Played, costs: dict[str, StepCost]) -> dict[str, Any]:
    """The row of a workload, computed and simulated."""
    cost = costs["windows" if workload.decoder.config.windows else "full"]
    began = time.perf_counter()
    log = StepLog()
    engine = SimulatedEngine(
        SimulatedModel.from_config(workload.decoder.config), cost, **workload.size, log=log
    )
    predicted, counters = play_simulated(engine, workload, real.known)
    elapsed = time.perf_counter() - began
    total, percentile = max(predicted.values()), tail(predicted)
    seconds = real.seconds
    row = {
        "workload": workload.name,
        "steps": counters.steps,
        "preemptions": counters.preemptions,
        "same steps": log.chunks == real.log.chunks
        and [(w.rows, w.begun) for w in log.works] == [(w.rows, w.begun) for w in real.log.works],
        "measured seconds": median(seconds),
        "predicted seconds": total,
        "error, %": 100 * (total / median(seconds) - 1),
        "spread of real runs, %": 100 * (max(seconds) - min(seconds)) / median(seconds),
        "P99 error, %": 100 * (percentile / median(real.tails) - 1),
        "times as fast as real time": total / elapsed,
    }
    print(row, flush=True)
    return rounded(row)


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """The row with percentages and ratios to one decimal."""
    short = ("%", "age", "real time")
    return {
        key: round(value, 1) if any(unit in key for unit in short) and isinstance(value, float) else value
        for key, value in row.items()
    }


def tail(times: Times) -> float:
    return float(np.percentile(list(times.values()), 99))


def traced(workload: Workload) -> Known:
    """The tokens of each turn, request and sample, which do not depend on the batch."""
    engine, tokens = Engine(workload.decoder, slots=SLOTS), {}
    for turn, batch in enumerate(rounds(workload, tokens)):
        ids = {engine.add(request, stream=False): position for position, request in batch}
        while engine.unfinished:
            for delta in engine.step():
                request, sample = ids[delta.request_id]
                tokens[turn, request, sample + delta.sample] = np.array(delta.token_ids, np.int32)
    return tokens


def rounds(workload: Workload, known: Known) -> Iterator[list[tuple[tuple[int, int], Request]]]:
    """The requests of each turn, with the number of the request and of its first sample."""
    yield [((number, 0), request) for number, request in enumerate(workload.requests)]
    for turn in range(1, workload.turns):
        batch = []
        for number, request in enumerate(workload.requests):
            for sample in range(request.n):
                tokens = [
                    part for past in range(turn) for part in (*known[past, number, sample].tolist(), 1, 2, 3)
                ]
                key = (turn, sample, number)
                batch.append(((number, sample), Request([*request.token_ids, *tokens], request.params, key)))
        yield batch


def play(engine: RecordedEngine, workload: Workload, known: Known, clock: Clock) -> tuple[Times, StepLog]:
    """The measured end of each turn. All turns of a round begin together, as in a rollout."""
    ends: Times = {}
    began = 0.0
    for turn, batch in enumerate(rounds(workload, known)):
        _, times = engine.run_timed([request for _, request in batch], clock)
        for (index, sample), seconds in times.items():
            (number, first), _ = batch[index]
            ends[turn, number, first + sample] = began + seconds
        began += max(times.values())
    return ends, engine.log


def play_simulated(engine: SimulatedEngine, workload: Workload, known: Known) -> tuple[Times, Any]:
    """The simulated end of each turn, on the virtual clock."""
    ends: Times = {}
    for turn, batch in enumerate(rounds(workload, known)):
        ids = {}
        for (number, first), request in batch:
            tokens = [known[turn, number, first + sample] for sample in range(request.n)]
            ids[engine.submit(request.token_ids, tokens)] = number, first
        while engine.unfinished:
            for delta in engine.step():
                number, first = ids[delta.request_id]
                ends[turn, number, first + delta.sample] = engine.clock.now
    return ends, engine.counters


# -- arriving requests ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrived:
    """Real runs with requests that arrive.

    Attributes:
        batch, arrivals: the requests, and when each arrives.
        known: their tokens.
        latencies: of each request, by run.
    """

    load: float
    batch: Sequence[Request]
    arrivals: Sequence[float]
    known: Known
    latencies: Sequence[Sequence[float]]


def arriving(decoder: Decoder, clock: Clock) -> Iterator[Arrived]:
    """Poisson arrivals at growing load, up to saturation."""
    batch = requests(5, ARRIVALS, prompt=(10, 120), answer=(20, 100))
    together = Workload("", decoder, batch, ENGINE_SIZE)
    known = traced(together)
    engine = RecordedEngine(decoder, **ENGINE_SIZE)
    capacity = ARRIVALS / max(play(engine, together, known, clock)[0].values())
    for load in LOADS:
        rng = np.random.default_rng(int(100 * load))
        arrivals = np.cumsum(rng.exponential(1 / (load * capacity), ARRIVALS)).tolist()
        real = [
            real_latencies(Engine(decoder, **ENGINE_SIZE), batch, arrivals, clock) for _ in range(REPEATS)
        ]
        yield Arrived(load, batch, arrivals, known, real)


def compared_arrivals(decoder: Decoder, real: Arrived, cost: StepCost) -> dict[str, Any]:
    """The row of a load, measured and simulated."""
    engine = SimulatedEngine(SimulatedModel.from_config(decoder.config), cost, **ENGINE_SIZE)
    predicted = simulated_latencies(engine, real.batch, real.arrivals, real.known)
    means = [fmean(times) for times in real.latencies]
    tails = [float(np.percentile(times, 99)) for times in real.latencies]
    row = {
        "load": real.load,
        "mean latency, measured ms": 1e3 * median(means),
        "predicted ms": 1e3 * fmean(predicted),
        "error, %": 100 * (fmean(predicted) / median(means) - 1),
        "spread, %": 100 * (max(means) - min(means)) / median(means),
        "P99, measured ms": 1e3 * median(tails),
        "P99 error, %": 100 * (float(np.percentile(predicted, 99)) / median(tails) - 1),
        "P99 spread, %": 100 * (max(tails) - min(tails)) / median(tails),
    }
    print(row, flush=True)
    return rounded(row)


def real_latencies(
    engine: Engine, asked: Sequence[Request], arrivals: Sequence[float], clock: Clock
) -> list[float]:
    """Seconds from the arrival of each request to its end."""
    began, waited = clock(), 0.0

    def now() -> float:
        return clock() - began + waited

    def wait(until: float) -> None:
        nonlocal waited
        if clock is time.process_time:  # this clock stops while the process sleeps
            waited += max(0.0, until - now())
        else:
            time.sleep(max(0.0, until - now()))

    return latencies(engine, arrivals, lambda number: engine.add(asked[number], stream=False), now, wait)


def simulated_latencies(
    engine: SimulatedEngine, asked: Sequence[Request], arrivals: Sequence[float], known: Any
) -> list[float]:
    def wait(until: float) -> None:
        engine.clock.now = max(engine.clock.now, until)

    def submit(number: int) -> int:
        return engine.submit(asked[number].token_ids, [known[0, number, 0]])

    return latencies(engine, arrivals, submit, lambda: engine.clock.now, wait)


def latencies(
    engine: Engine,
    arrivals: Sequence[float],
    submit: Callable[[int], int],
    now: Callable[[], float],
    wait: Callable[[float], None],
) -> list[float]:
    """Add requests when they arrive, between two steps of the engine, until all have ended."""
    ids: dict[int, int] = {}
    seconds = [0.0] * len(arrivals)
    coming = 0
    while coming < len(arrivals) or engine.unfinished:
        if not engine.unfinished:
            wait(arrivals[coming])
        while coming < len(arrivals) and arrivals[coming] <= now():
            ids[submit(coming)] = coming
            coming += 1
        for delta in engine.step():
            number = ids[delta.request_id]
            seconds[number] = now() - arrivals[number]
    return seconds


# -- recipes -------------------------------------------------------------------------------------------------


def recipes(home: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The RL stages of recipes, run and then simulated with their own episodes."""
    command(home, "calibrate", "quickstart")
    for name in names:
        path = str(HERE / "asynchronous.yaml" if name == "asynchronous" else bundled_recipe(name))
        changes = [word for override in RECIPES[name] for word in ("--set", override)]
        guess = ("--wait", "0.2") if name == "asynchronous" else ()  # its mean; the waits of a task are equal
        guessed = {
            row["stage"]: row["seconds"]
            for row in command(home, "simulate", path, *changes, *guess)["stages"]
        }
        runs = [
            command(home, "run", path, *changes, *measured_again(number, guessed))
            for number in range(STAGE_REPEATS)
        ]
        for stage, guess_seconds in guessed.items():
            row = stage_row(
                home, (name, path, changes), stage, [MeasuredStage.of(run, stage) for run in runs]
            )
            error = 100 * (guess_seconds / row["measured seconds"] - 1)
            yield row | {"error before any run, %": round(error, 1)}


def measured_again(number: int, stages: Iterable[str]) -> list[str]:
    """Changes of a recipe that make `run` repeat its RL stages, and leave their work as it is."""
    return [word for stage in stages for word in ("--set", f"{stage}.keep.last={1 + number}")]


@dataclass(frozen=True)
class MeasuredStage:
    """A real run of a stage.

    Attributes:
        parts: seconds of each part of the steps after the first ones, which allocate memory.
        rest: seconds outside the steps: the beginning and the end of the stage.
    """

    seconds: float
    artifacts: Path
    parts: Mapping[str, float]
    rest: float
    steps: int

    @classmethod
    def of(cls, ran: Mapping[str, Any], name: str) -> "MeasuredStage":
        """The stage of a run, given the output of the command."""
        (seconds,) = (stage["seconds"] for stage in ran["stages"] if stage["name"] == name)
        artifacts = Path(ran["bundles"][name]) / "artifacts"
        lines = list(read_json_lines(artifacts / "timings.jsonl"))
        return cls(seconds, artifacts, part_sums(lines), outside_steps(seconds, lines), len(lines))


def part_sums(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each part of the steps, without the first ones: the start of a stage has their excess."""
    return {part: sum(line.get(part, 0.0) for line in lines[WARMUP_STEPS:]) for part in STEP_PARTS}


def outside_steps(seconds: float, lines: Sequence[Mapping[str, Any]]) -> float:
    return seconds - sum(line.get(part, 0.0) for line in lines for part in STEP_PARTS)


def stage_row(
    home: Path, recipe: tuple[str, str, list[str]], stage: str, real: Sequence[MeasuredStage]
) -> dict[str, Any]:
    """The measured and the predicted times of a stage. Of several runs, the medians count."""
    name, path, changes = recipe
    artifacts = real[0].artifacts
    words = ["simulate", path, *changes, "--episodes", str(artifacts / "episodes")]
    words += WAIT if name == "asynchronous" else ()
    began = time.monotonic()
    stages = command(home, *words)["stages"]
    elapsed = time.monotonic() - began
    (predicted,) = (row for row in stages if row["stage"] == stage)
    seconds = [run.seconds for run in real]
    parts = part_sums(predicted["steps"])
    errors = {
        part: 100 * (parts[part] / spent - 1)
        for part in STEP_PARTS
        if (spent := median(run.parts[part] for run in real))
    }
    row = {
        "recipe": f"{name}/{stage}",
        "steps": real[0].steps,
        "measured seconds": median(seconds),
        "predicted seconds": predicted["seconds"],
        "error, %": 100 * (predicted["seconds"] / median(seconds) - 1),
        "spread of real runs, %": 100 * (max(seconds) - min(seconds)) / median(seconds),
        **{f"error of {part}, %": error for part, error in errors.items()},
        "beginning and end, measured seconds": median(run.rest for run in real),
        "beginning and end, predicted seconds": outside_steps(predicted["seconds"], predicted["steps"]),
        "mean age, measured, updates": fmean(
            line["staleness"] for line in read_json_lines(artifacts / "metrics.jsonl")
        ),
        "mean age, predicted, updates": predicted["mean_age"],
        "seconds of the command": elapsed,
    }
    print(row, flush=True)
    return rounded(row)


def report(
    closed: list[dict[str, Any]], opened: list[dict[str, Any]], stages: list[dict[str, Any]]
) -> dict[str, Any]:
    def mean(rows: Sequence[dict[str, Any]], name: str) -> float:
        return fmean(abs(row[name]) for row in rows) if rows else float("nan")

    same = sum(row["same steps"] for row in closed)
    before = mean(stages, "error before any run, %")
    speeds = [row["times as fast as real time"] for row in closed]
    worst, last = max(abs(row["error, %"]) for row in closed), abs(opened[-1]["error, %"])
    findings = [
        f"{same} of {len(closed)} workloads take the same steps in the simulation as in reality, with the"
        " same rows, prefill chunks and preemptions.",
        f"The wall time of a workload is off by {mean(closed, 'error, %'):.1f}% on average (at most"
        f" {worst:.1f}%), and the P99 latency by {mean(closed, 'P99 error, %'):.1f}%.",
        f"With arriving requests, the mean latency is off by {mean(opened, 'error, %'):.1f}% on average over"
        f" the loads, and by {last:.1f}% at a load of {LOADS[-1]:.0%} of the capacity.",
        f"The wall time of an RL stage is off by {mean(stages, 'error, %'):.1f}% on average, and"
        f" by {before:.1f}% if it is simulated before any run, with the lengths of the demonstrations.",
        f"The simulation is {min(speeds):.1f} to {max(speeds):.1f} times as fast as reality. A step of the"
        " tiny model takes about 1 ms. The scheduler, which the simulation runs too, takes a tenth of this.",
    ]
    return {
        "title": "Simulated runs against real ones",
        "about": ABOUT,
        "findings": findings,
        "engine": closed,
        "arriving requests": opened,
        "RL stages": stages,
    }


if __name__ == "__main__":
    main()
