"""The speed of this machine: measured by `perilune doctor`, kept in the home, used by `perilune run --plan`.

Work with a model takes a constant time and a time for each token, and both grow with the model. The overhead
of stages is measured on a small recipe.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from perilune.bundle.machine import observe_machine
from perilune.errors import WorkFailedError
from perilune.files import read_json_lines, read_json_or_empty, write_json
from perilune.metrics.training import STEP_PARTS

if TYPE_CHECKING:
    from perilune.data.episode import Episode
    from perilune.models.config.decoder_config import DecoderConfig
    from perilune.models.decoder import Decoder
    from perilune.models.narrow import Precision

CALIBRATION_FILE = "calibration.json"  # file in the home
DECODE_ROWS = (8, 128)  # sequences of the measured decode steps
UPDATE_TOKENS = (384, 1536)  # tokens of the measured optimizer steps
SAMPLES, LENGTH, PROMPT = 8, 24, 8  # episodes of a group, tokens of an answer and of a prompt
MAX_OVERRUN = 3  # times the planned time, after which the last model is left out
NEGLIGIBLE = 1e-9  # seconds; a power law needs positive times
ANSWER_COUNTS = (4 * 4, 32 * 32)  # answers in the two evaluations of the recipe

SUMS, TURNS = "sums.py:Sums", "sums.py:Turns"
RECIPE = f"""name: calibration
model: {{preset: tiny}}
environment: {{id: "{SUMS}"}}
resources: {{threads: 1}}
stages:
  - {{name: collect, task: collect, teacher: gold, traces: 32}}
  - {{name: sft, task: sft, data: collect, steps: 1, batch_size: 4}}
  - {{name: rl, task: rl, checkpoint: sft, steps: 20, prompts: 2, samples: 2, max_tokens: 4}}
  - {{name: evaluate, task: evaluate, checkpoint: rl, tasks: 4, samples: 3, max_tokens: 4}}
  - {{name: many, task: evaluate, checkpoint: rl, tasks: 32, samples: 31, max_tokens: 4}}
"""

ENVIRONMENT = '''"""Sums. A wrong answer has a reward too, because RL needs groups with different rewards."""

from perilune.environments import MultiTurn, Score, SingleTurn, Task, ask, end_episode


class Sums(SingleTurn):
    id = "sums"

    def __init__(self, section):
        pass

    def tasks(self, split, seed):
        for number in range(split == "heldout", 800, 2):
            prompt = ({"role": "user", "content": f"{number}+1="},)
            yield Task(str(number), prompt, {"answer": str(number + 1)})

    def score(self, task, transcript):
        is_right = transcript.text == task.data["answer"]
        return Score(1.0 if is_right else sum(map(ord, transcript.text)) % 7 / 7)


class Turns(MultiTurn):
    id, max_turns, cut_off = "turns", 3, "0"
    tasks = Sums.tasks

    def __init__(self, section):
        pass

    def play(self, task, rng):
        for _ in range(self.max_turns):
            answer = yield ask("?")
        yield end_episode(sum(map(ord, answer)) % 7 / 7)
'''

SECTION = {"id": SUMS, "source": ENVIRONMENT}


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of work with a model: a constant, and a time for each token.

    Attributes:
        decode: of a decode step, and of each sequence in it.
        update: of an optimizer step of supervised training, and of each token in it.
        reinforce: of an optimizer step of reinforcement learning with its checks, and of each token in it.
    """

    parameters: int
    decode: tuple[float, float]
    update: tuple[float, float]
    reinforce: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds that stages take in addition to the work with the model.

    Attributes:
        stages: of a whole stage without its steps, by task: its process, imports, files and checks.
        step: of a step of reinforcement learning, for its metrics and checks.
        turn: of each sampled answer, for its episode; without the scorer's process.
        memory: peak bytes of a stage with little work, by task.
        scorer: of the start of the scorer's process, which `stages` include.
    """

    stages: Mapping[str, float]
    step: float
    turn: float
    memory: Mapping[str, int]
    scorer: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The speeds of a device of this machine: "cuda", or a number of threads.

    Attributes:
        speeds: of models of growing size.
        bfloat16: time with bfloat16 products relative to float32, by field of `Speed`.
        measured: time of the measurement, in seconds since 1970.
    """

    device: str
    speeds: tuple[Speed, ...]
    bfloat16: Mapping[str, float]
    overhead: Overhead
    measured: float

    def seconds(self, kind: str, parameters: int, precision: Precision = "float32") -> tuple[float, float]:
        """Interpolate the times of `kind` (a field of `Speed`) with power laws through the nearest sizes."""
        ordered = sorted(self.speeds, key=lambda speed: abs(math.log(speed.parameters / parameters)))[:2]
        low, high = sorted(ordered, key=lambda speed: speed.parameters)
        share = math.log(parameters / low.parameters) / math.log(high.parameters / low.parameters)
        factor = self.bfloat16[kind] if precision == "bfloat16" else 1.0
        constant, token = (
            factor * float(small * (large / small) ** share)
            for small, large in zip(getattr(low, kind), getattr(high, kind), strict=True)
        )
        return constant, token


def calibrate_devices(devices: Sequence[str], seconds: float) -> list[Calibration]:
    """Measure a small recipe, and each device ("cuda", or a number of threads) for a share of `seconds`."""
    overhead, calibrations = measure_overhead(), []
    for device in devices:
        with device_clock(device) as clock:
            speeds, bfloat16 = measure_speeds(device, seconds / len(devices), clock)
        calibrations.append(Calibration(device, speeds, bfloat16, overhead, time.time()))
    return calibrations


@contextmanager
def device_clock(device: str) -> Iterator[Callable[[], float]]:
    """Let torch use the threads of a device, and yield the clock to measure it with."""
    import torch

    before = torch.get_num_threads()
    if device != "cuda":
        torch.set_num_threads(int(device))
    try:
        # Other load on the machine changes processor time little.
        yield time.process_time if device == "1" else time.perf_counter
    finally:
        torch.set_num_threads(before)


def measure_speeds(
    device: str, seconds: float, clock: Callable[[], float]
) -> tuple[tuple[Speed, ...], dict[str, float]]:
    """Return the speeds of models of three sizes, and the relative times of the last with bfloat16."""
    from perilune.models.checkpoints.loading import new_model
    from perilune.models.text.tokenizer import Tokenizer

    models = [new_model(config, Tokenizer.characters(), seed=0) for config in _model_configs()]
    share = seconds / (6 * len(models))
    began, speeds = time.perf_counter(), list[Speed]()
    for model in models:
        if len(speeds) > 1 and time.perf_counter() - began > MAX_OVERRUN * seconds:
            break  # a busy machine; two sizes are enough for a power law
        model.to("cuda" if device == "cuda" else "cpu")
        decode = _fit_line(DECODE_ROWS, partial(_decode_seconds, model, share, clock))
        update = _fit_line(UPDATE_TOKENS, partial(_update_seconds, model, share, clock))
        reinforce = _fit_line(UPDATE_TOKENS, partial(_rl_seconds, model, share, clock))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        speeds.append(Speed(parameters, decode, update, reinforce))
    return tuple(speeds), _bfloat16_times(models[len(speeds) - 1], share, clock, speeds[-1])


def _bfloat16_times(
    model: Decoder, seconds: float, clock: Callable[[], float], speed: Speed
) -> dict[str, float]:
    """Return the times of large steps with bfloat16 products, relative to those of `speed` in float32."""
    model.set_precision("bfloat16")
    (_, rows), (_, tokens) = DECODE_ROWS, UPDATE_TOKENS
    decode = _decode_seconds(model, seconds, clock, rows) / (speed.decode[0] + rows * speed.decode[1])
    update = _update_seconds(model, seconds, clock, tokens) / (speed.update[0] + tokens * speed.update[1])
    return {"decode": decode, "update": update, "reinforce": update}


def _model_configs() -> list[DecoderConfig]:
    """Return the models of 0.3, 9 and 31 million parameters."""
    from perilune.models.config.decoder_config import PRESETS

    small = PRESETS["small"].replace(num_kv_heads=2)
    return [
        PRESETS["tiny"],
        small.replace(hidden_size=384, intermediate_size=1024, num_layers=6, num_heads=6, head_dim=64),
        small.replace(hidden_size=640, intermediate_size=1792, num_layers=7, num_heads=10, head_dim=64),
    ]


def _fit_line(sizes: tuple[int, int], measure: Callable[[int], float]) -> tuple[float, float]:
    """Return the constant and the slope of a time that grows with a size, through two sizes."""
    low, high = map(measure, sizes)
    slope = max((high - low) / (sizes[1] - sizes[0]), NEGLIGIBLE)
    return max(low - slope * sizes[0], NEGLIGIBLE), slope


def _decode_seconds(model: Decoder, seconds: float, clock: Callable[[], float], rows: int) -> float:
    from perilune.engine.throughput import measure_throughput

    throughput = measure_throughput(model, seconds=seconds, groups=rows // 8)
    spent = throughput.cpu_seconds if clock is time.process_time else throughput.seconds
    return spent / (throughput.tokens / rows)


def _update_seconds(model: Decoder, seconds: float, clock: Callable[[], float], tokens: int) -> float:
    """Measure an optimizer step of supervised training: packing, forward and backward pass, update."""
    from perilune.learn.algorithms import algorithm
    from perilune.learn.batch import pack
    from perilune.learn.trainer import Learner

    episodes = [episode for group in _sample_groups(model, tokens) for episode in group]
    learner, weigh = Learner(model), algorithm("sft")

    def step() -> None:
        learner.forward_backward(pack([weigh(episodes, max_tokens=0)], 4096))
        learner.optim_step(1e-5)

    return _time_steps(step, seconds, clock)


def _rl_seconds(model: Decoder, seconds: float, clock: Callable[[], float], tokens: int) -> float:
    from perilune.learn.trainer import Learner
    from perilune.tasks.rl.spec import RLSpec
    from perilune.tasks.rl.update import PolicyUpdater

    spec = RLSpec(checkpoint="", lr=1e-5, prompts=tokens // (SAMPLES * LENGTH), samples=SAMPLES)
    updates = PolicyUpdater(spec, Learner(model, spec), None)
    groups = _sample_groups(model, tokens)
    return _time_steps(lambda: updates.update(groups, 1), seconds, clock)


def _sample_groups(model: Decoder, tokens: int) -> list[tuple[Episode, ...]]:
    """Return groups of sampled episodes with about `tokens` tokens in total."""
    import numpy as np

    from perilune.data.episode import Episode, sampled_tokens
    from perilune.engine.engine import Engine
    from perilune.engine.request import Prompt, SamplingParams

    shape = (tokens // (SAMPLES * LENGTH), PROMPT)
    ids = np.random.default_rng(0).integers(model.config.vocab_size, size=shape, dtype=np.int32)
    prompts = [Prompt(row.tolist(), (0, 0, index)) for index, row in enumerate(ids)]
    engine = Engine(model, slots=len(prompts) * SAMPLES)
    sampled = engine.sample(prompts, SAMPLES, SamplingParams(max_tokens=LENGTH))
    return [
        tuple(
            Episode(
                episode_id=f"{number}/{sample}",
                group_id=str(number),
                task_id=str(number),
                environment="",
                seed=0,
                messages=(),
                prompt_ids=row,
                reward=float(sample % 2),
                **sampled_tokens(answer),
            )
            for sample, answer in enumerate(group)
        )
        for number, (row, group) in enumerate(zip(ids, sampled, strict=True))
    ]


def _time_steps(step: Callable[[], object], seconds: float, clock: Callable[[], float]) -> float:
    step()  # allocates memory and chooses kernels
    began, until, steps = clock(), time.perf_counter() + seconds, 0
    while steps == 0 or time.perf_counter() < until:
        step()
        steps += 1
    return (clock() - began) / steps


def measure_overhead() -> Overhead:
    """Run a small recipe in a home of its own, and measure the overhead of its stages.

    Raises:
        WorkFailedError: when the recipe fails.
    """
    with run_on_sums(RECIPE) as document:
        scorer = _scorer_start_seconds(SECTION)
        took = {stage["name"]: stage["seconds"] for stage in document["stages"]}
        memory = {stage["name"]: (stage["memory"] or {}).get("peak_bytes", 0) for stage in document["stages"]}
        lines = {name: _read_timings(Path(bundle)) for name, bundle in document["bundles"].items()}
    (few,), (many,) = lines["evaluate"], lines.pop("many")
    turn = (many["processor"] - few["processor"]) / (ANSWER_COUNTS[1] - ANSWER_COUNTS[0])
    lines["evaluate"] = []  # its few answers take no time
    steps = {name: sum(line[part] for line in rows for part in STEP_PARTS) for name, rows in lines.items()}
    stages = {name: took[name] - seconds for name, seconds in steps.items()}
    step = median(line["other"] for line in lines["rl"])
    peaks = {name: memory[name] for name in ("sft", "rl", "evaluate")}
    return Overhead(stages, step, max(turn, NEGLIGIBLE), peaks, scorer)


@contextmanager
def run_on_sums(recipe: str) -> Iterator[dict[str, Any]]:
    """Run a recipe on the environment `SUMS` in a temporary home, and yield the output of `run --json`.

    Raises:
        WorkFailedError: when the recipe fails.
    """
    with tempfile.TemporaryDirectory(prefix="perilune-calibration-") as name:
        folder = Path(name)
        path = folder / "calibration.yaml"
        path.write_text(recipe)
        (folder / SUMS.partition(":")[0]).write_text(ENVIRONMENT)
        command = [sys.executable, "-m", "perilune.cli.main", "run", str(path), "--json"]
        home = {"PERILUNE_HOME": str(folder / "home")}
        done = subprocess.run(command, env=os.environ | home, capture_output=True, text=True, check=False)
        if done.returncode:
            raise WorkFailedError("the calibration recipe failed", remedy=done.stderr[-2000:])
        yield json.loads(done.stdout)


def _scorer_start_seconds(section: Mapping[str, Any]) -> float:
    """Return the processor seconds until the scorer's process of an environment has scored an answer."""
    from perilune.environments import Transcript, make_environment
    from perilune.plan.trial import child_processor_seconds
    from perilune.verifiers import Scorer

    task = next(make_environment(section).tasks("train", 0))
    with Scorer(section) as scorer:
        scorer.score([(task, Transcript("0"))])
        return child_processor_seconds()


def _read_timings(bundle: Path) -> list[dict[str, Any]]:
    path = bundle / "artifacts" / "timings.jsonl"
    return list(read_json_lines(path)) if path.exists() else []


def machine_name() -> str:
    processor = observe_machine().processor
    return f"{platform.node()}: {processor.model}, {processor.usable_cores:g} cores"


def save_calibrations(home: Path, calibrations: Sequence[Calibration]) -> None:
    """Write the calibrations of this machine to the home; those of other machines stay."""
    document = read_json_or_empty(home / CALIBRATION_FILE)
    document[machine_name()] = {calibration.device: asdict(calibration) for calibration in calibrations}
    write_json(home / CALIBRATION_FILE, document)


def load_calibration(home: Path, device: str) -> Calibration | None:
    """Return the calibration of a device of this machine ("cuda", or a number of threads), or None."""
    saved = read_json_or_empty(home / CALIBRATION_FILE).get(machine_name(), {}).get(device)
    try:
        return TypeAdapter(Calibration).validate_python(saved)
    except ValidationError:  # none, or written by an earlier version
        return None
