"""Measures the steps of the engine with a model on this machine, and fits the coefficients of their time."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from perilune.data.episodes_file import read_episodes
from perilune.engine.request import Request, SamplingParams
from perilune.files import read_json_lines
from perilune.models.decoder import Decoder
from perilune.simulate.episodes import GroupShape
from perilune.simulate.recording import RecordedEngine
from perilune.simulate.step_cost import StepCost, StepWork, fit, relative_fit

Clock = Callable[[], float]

ROWS = (64, 1, 256, 8, 16, 128, 2, 32, 4, 12, 96, 3, 24, 192, 48, 6)  # the most informative first
PROMPTS = (6, 150, 40, 500)  # tokens
ANSWER = 20  # tokens of an answer, about
MOST = 64_000  # prompt tokens of a measurement
GROUP = 8  # samples of a prompt
REPEATS = 3  # of which the median counts
TOGETHER = 8  # equal decoding steps whose mean is one measurement
LEAST = 8  # shapes that are always measured
WARM = 2  # steps of training that are left out


def measure_steps(
    decoder: Decoder, seconds: float, clock: Clock, say: Callable[[str], None] = lambda text: None
) -> tuple[StepCost, float]:
    """The times of steps of many shapes, fitted; and the mean relative error of the fit.

    Args:
        seconds: after which no further shape is measured.
        clock: processor time for one thread, because other load changes it little; else wall-clock time.
    """
    until = time.perf_counter() + seconds
    measured: list[tuple[StepWork, float]] = []
    for number, shape in enumerate(_shapes(decoder.config.max_position_embeddings)):
        if number >= LEAST and time.perf_counter() > until:
            break
        say(f"Measuring the engine: {shape[0]} samples after {shape[1]} tokens")
        measured += _measure(decoder, *shape, clock)
    works, spent = [list(column) for column in zip(*measured, strict=True)]
    cost = fit(works, spent)
    return cost, fmean(abs(cost.of_step(work) / one - 1) for work, one in measured)


def _shapes(positions: int) -> Iterator[tuple[int, int, int]]:
    """Samples in flight, tokens of their prompts, and samples of each prompt."""
    for rows in ROWS:
        for prompt in PROMPTS:
            if rows * prompt <= MOST and prompt + 2 * ANSWER <= positions:
                yield from dict.fromkeys([(rows, prompt, min(rows, GROUP)), (rows, prompt, 1)])


def _requests(decoder: Decoder, rows: int, prompt: int, samples: int, repeat: int) -> list[Request]:
    """Groups that end together, or twice as many single requests, so that some begin while others decode."""
    rng = np.random.default_rng(repeat)
    count = rows // samples if samples > 1 else 2 * rows
    ids = rng.integers(decoder.config.vocab_size, size=(count, prompt)).tolist()
    answers = [ANSWER + (number % 3 if samples > 1 else number * 7 % ANSWER) for number in range(count)]
    return [
        Request(row, SamplingParams(answer), (0, repeat, number), samples)
        for number, (row, answer) in enumerate(zip(ids, answers, strict=True))
    ]


def _measure(
    decoder: Decoder, rows: int, prompt: int, samples: int, clock: Clock
) -> Iterator[tuple[StepWork, float]]:
    """Steps and their seconds with at most `rows` samples in flight."""
    engine = RecordedEngine(decoder, slots=rows, cache_tokens=rows * (prompt + 3 * ANSWER))
    times = []
    for repeat in range(1 + REPEATS):
        engine.log.works.clear()
        requests = _requests(decoder, rows, prompt, samples, repeat)
        times.append(engine.timed(requests, clock)[0])
    spent = [median(of_step) for of_step in zip(*times[1:], strict=True)]  # the first allocates memory
    for plain, run in groupby(zip(engine.log.works, spent, strict=True), key=lambda one: _is_plain(one[0])):
        found = list(run)
        size = TOGETHER if plain else 1
        for start in range(0, len(found), size):
            part = found[start : start + size]
            yield part[len(part) // 2][0], fmean(seconds for _, seconds in part)


def _is_plain(work: StepWork) -> bool:
    """Whether all samples only decode."""
    return not (work.prefill or work.begun or work.ended)


@dataclass(frozen=True, slots=True)
class TrainingTimes:
    """Times fitted to the stages of a calibration recipe; fields as in `MeasuredTimes`."""

    update: tuple[float, float, float]
    recording: tuple[float, float, float]
    scoring: tuple[float, float]
    start: float


def fit_training(folders: Sequence[Path], seconds: Sequence[float]) -> TrainingTimes:
    """The times of training steps, from the artifacts of finished RL stages and the seconds of each."""
    lines = [list(_steps(folder)) for folder in folders]
    warm = [line for stage in lines for line in stage[WARM:]]

    def coefficients(part: str, *names: str) -> tuple[float, ...]:
        features = np.array([[1.0, *(line[name] for name in names)] for line in warm])
        return tuple(relative_fit(features, np.array([line[part] for line in warm])).tolist())

    update = coefficients("learning", "tokens", "episodes")
    recording, scoring = coefficients("other", "fed", "episodes"), coefficients("scoring", "episodes")
    starts = []
    for stage, total in zip(lines, seconds, strict=True):
        typical = sum(median(line[part] for line in stage[WARM:]) for part in PARTS)
        starts.append(total - len(stage) * typical)
    return TrainingTimes(
        (update[0], update[1], update[2]),
        (recording[0], recording[1], recording[2]),
        (scoring[0], scoring[1]),
        median(starts),
    )


PARTS = ("sampling", "scoring", "learning", "other")  # of timings.jsonl


def _steps(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The timings of each step, with its tokens, those of groups with a gradient, and its episodes."""
    for line in read_json_lines(folder / "timings.jsonl"):
        episodes = list(read_episodes(folder / "episodes" / f"step-{line['step']:06d}.parquet"))
        groups = [GroupShape.of(list(part)) for _, part in groupby(episodes, lambda one: one.group_id)]
        tokens = sum(group.fed for group in groups if group.live)
        fed = sum(group.fed for group in groups)
        yield {**line, "tokens": tokens, "fed": fed, "episodes": len(episodes)}
