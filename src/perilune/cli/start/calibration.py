"""The speed of this machine: measured by `perilune doctor`, kept in the home, used by `perilune run --plan`.

Speeds are processor seconds divided by the number of threads. On an idle machine that is wall-clock time, and
other load changes it little.
"""

from __future__ import annotations

import math
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.errors import RequestError
from perilune.files import read_json, write_json

if TYPE_CHECKING:
    from perilune.models.decoder import Decoder

FILE = "calibration.json"  # in the home
START = "import perilune.tasks.rl.loop, perilune.environments, reasoning_gym"  # what most stages import
BATCH, LENGTH, PROMPT = 32, 48, 16  # sequences of a training step, their tokens, and those of their prompts


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds per sampled token and per trained token of a model."""

    parameters: int
    sampling: float
    learning: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The speeds of a machine with a number of threads.

    Attributes:
        start: seconds in which a stage starts: Python and its imports.
        speeds: of models of growing size.
        measured: when, in seconds since 1970.
    """

    threads: int
    start: float
    speeds: tuple[Speed, ...]
    measured: float

    def per_token(self, kind: str, parameters: int) -> float:
        """Seconds per token of `kind` (sampling, learning): a power law through the two nearest sizes."""
        ordered = sorted(self.speeds, key=lambda one: abs(math.log(one.parameters / parameters)))[:2]
        low, high = sorted(ordered, key=lambda one: one.parameters)
        slope = math.log(getattr(high, kind) / getattr(low, kind)) / math.log(
            high.parameters / low.parameters
        )
        return float(getattr(low, kind) * (parameters / low.parameters) ** slope)


def calibrate(threads: int, seconds: float) -> Calibration:
    """Measure with torch's current number of threads, which is `threads`, for about `seconds` in all."""
    from perilune.models.checkpoints.loading import new_model
    from perilune.models.config.decoder_config import PRESETS
    from perilune.models.text.tokenizer import Tokenizer

    medium = PRESETS["small"].replace(
        hidden_size=384, intermediate_size=1024, num_layers=6, num_heads=6, num_kv_heads=2
    )
    models = [new_model(config, Tokenizer.characters(), seed=0) for config in (PRESETS["tiny"], medium)]
    share = seconds / (2 * len(models))
    speeds = tuple(
        Speed(
            sum(one.numel() for one in model.parameters()),
            _sampling(model, share, threads),
            _learning(model, share, threads),
        )
        for model in models
    )
    return Calibration(threads, _start(), speeds, time.time())


def _sampling(model: Decoder, seconds: float, threads: int) -> float:
    from perilune.engine.throughput import measure_throughput

    found = measure_throughput(model, seconds=seconds)
    return found.processor / threads / found.tokens


def _learning(model: Decoder, seconds: float, threads: int) -> float:
    import numpy as np

    from perilune.data.episode import Episode, unsampled_tokens
    from perilune.learn.algorithms import algorithm
    from perilune.learn.batch import pack
    from perilune.learn.trainer import Learner

    rows = np.random.default_rng(0).integers(model.config.vocab_size, size=(BATCH, LENGTH), dtype=np.int32)
    episodes = [
        Episode(
            episode_id=str(index),
            group_id=str(index),
            task_id=str(index),
            environment="",
            seed=0,
            messages=(),
            prompt_ids=row[:PROMPT],
            **unsampled_tokens(row[PROMPT:]),
        )
        for index, row in enumerate(rows)
    ]
    learner, weigh = Learner(model), algorithm("sft")

    def step() -> None:
        learner.forward_backward(pack([weigh(episodes, max_tokens=0)], 4096))
        learner.optim_step(1e-5)

    step()  # allocates memory and chooses kernels
    began, until, steps = time.process_time(), time.perf_counter() + seconds, 0
    while steps == 0 or time.perf_counter() < until:
        step()
        steps += 1
    return (time.process_time() - began) / threads / (steps * BATCH * LENGTH)


def _start() -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", START], check=False, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _machine() -> str:
    from perilune.bundle.machine import observe_machine

    processor = observe_machine().processor
    return f"{platform.node()}: {processor.model}, {processor.usable_cores:g} cores"


def save(home: Path, found: Sequence[Calibration]) -> None:
    """Keep the calibrations of this machine in the home, those of other machines untouched."""
    document = _document(home)
    document[_machine()] = {str(one.threads): asdict(one) for one in found}
    write_json(home / FILE, document)


def load(home: Path, threads: int) -> Calibration | None:
    """The calibration of this machine with that many threads (0: all cores), or None."""
    from perilune.bundle.machine import usable_threads

    found = _document(home).get(_machine(), {}).get(str(threads or usable_threads()))
    return (
        None
        if found is None
        else Calibration(**{**found, "speeds": tuple(Speed(**s) for s in found["speeds"])})
    )


def _document(home: Path) -> dict[str, Any]:
    try:
        return dict(read_json(home / FILE))
    except (RequestError, OSError):  # none yet, or damaged: `perilune doctor` measures again
        return {}
