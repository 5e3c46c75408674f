"""Measures steps of the engine with a model on this machine, and fits the coefficients of their duration."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from perilune.data.episodes_file import read_episodes
from perilune.engine.request import Request, SamplingParams
from perilune.files import read_json_lines
from perilune.metrics.training import STEP_PARTS
from perilune.models.decoder import Decoder
from perilune.simulate.episodes import GroupShape
from perilune.simulate.recording import RecordedEngine
from perilune.simulate.step_cost import StepCost, StepWork, fit_relative, fit_step_cost
from perilune.tasks.checks.preflight import MIN_LONG_RUN_STEPS

Clock = Callable[[], float]

# Samples in flight, the most informative numbers first.
ROWS = (64, 1, 256, 8, 16, 128, 2, 32, 4, 12, 96, 3, 24, 192, 48, 6)
PROMPT_TOKENS = (6, 150, 40, 500)
ANSWER_TOKENS = 20  # approximate length of an answer
MAX_PROMPT_TOKENS = 24_000  # maximum tokens of all prompts of a shape
GROUP_SIZE = 8  # samples of a prompt
REPEATS = 3  # measurements of a shape, of which the median counts
STEPS_PER_MEASUREMENT = 8  # equal decoding steps whose mean is one measurement
MIN_SHAPES = 8  # shapes that are always measured
WARMUP_STEPS = 2  # training steps at the beginning that are left out


def measure_steps(
    decoder: Decoder, seconds: float, clock: Clock, report: Callable[[str], None] = lambda text: None
) -> tuple[StepCost, float]:
    """Measure steps of many shapes; return the fitted times and their mean relative error.

    Args:
        seconds: time after which no further shape is measured.
        clock: returns CPU time if one thread computes, because other load hardly changes it; otherwise
            wall-clock time.
        report: called with a line of text for each shape.
    """
    deadline = time.perf_counter() + seconds
    measured: list[tuple[StepWork, float]] = []
    for number, shape in enumerate(_shapes(decoder.config.max_position_embeddings)):
        if number >= MIN_SHAPES and time.perf_counter() > deadline:
            break
        report(f"Measuring the engine: {shape[0]} samples after {shape[1]} tokens")
        measured += _measure_shape(decoder, *shape, clock)
    works, spent = [list(column) for column in zip(*measured, strict=True)]
    cost = fit_step_cost(works, spent)
    return cost, fmean(abs(cost.step_seconds(work) / seconds - 1) for work, seconds in measured)


def _shapes(positions: int) -> Iterator[tuple[int, int, int]]:
    """Yield the shapes to measure: samples in flight, tokens of a prompt, and samples of a prompt."""
    for rows in ROWS:
        for prompt in PROMPT_TOKENS:
            for samples in dict.fromkeys((min(rows, GROUP_SIZE), 1)):
                tokens = prompt * _request_count(rows, samples)
                if tokens <= MAX_PROMPT_TOKENS and prompt + 2 * ANSWER_TOKENS <= positions:
                    yield rows, prompt, samples


def _request_count(rows: int, samples: int) -> int:
    """Return the number of requests of a shape: groups that fill the rows once, or single samples twice."""
    return rows // samples if samples > 1 else 2 * rows


def _make_requests(decoder: Decoder, rows: int, prompt: int, samples: int, repeat: int) -> list[Request]:
    """Return groups whose samples end together, or single samples, some of which begin during decoding."""
    rng = np.random.default_rng(repeat)
    count = _request_count(rows, samples)
    ids = rng.integers(decoder.config.vocab_size, size=(count, prompt)).tolist()
    answers = [
        ANSWER_TOKENS + (number % 3 if samples > 1 else number * 7 % ANSWER_TOKENS) for number in range(count)
    ]
    return [
        Request(row, SamplingParams(answer), (0, repeat, number), samples)
        for number, (row, answer) in enumerate(zip(ids, answers, strict=True))
    ]


def _measure_shape(
    decoder: Decoder, rows: int, prompt: int, samples: int, clock: Clock
) -> Iterator[tuple[StepWork, float]]:
    """Yield steps and their seconds with at most `rows` samples in flight."""
    engine = RecordedEngine(decoder, slots=rows, cache_tokens=rows * (prompt + 3 * ANSWER_TOKENS))
    times = []
    for repeat in range(1 + REPEATS):
        engine.log.works.clear()
        requests = _make_requests(decoder, rows, prompt, samples, repeat)
        times.append(engine.run_timed(requests, clock)[0])
    # Without the first repeat, which allocates memory.
    spent = [median(step_seconds) for step_seconds in zip(*times[1:], strict=True)]
    for plain, run in groupby(zip(engine.log.works, spent, strict=True), key=lambda pair: _is_plain(pair[0])):
        steps = list(run)
        size = STEPS_PER_MEASUREMENT if plain else 1
        for start in range(0, len(steps), size):
            part = steps[start : start + size]
            yield part[len(part) // 2][0], fmean(seconds for _, seconds in part)


def _is_plain(work: StepWork) -> bool:
    """Return whether all samples only decode."""
    return not (work.prefill or work.begun or work.ended)


def fit_training(folders: Sequence[Path], seconds: Sequence[float]) -> dict[str, Any]:
    """Return fields of `MeasuredTimes`, fitted to the training steps of finished RL stages.

    At least one stage must have the checks of a long run, and at least one must not.

    Args:
        folders: the folder of artifacts of each stage.
        seconds: duration of each stage.
    """
    lines = [list(_read_steps(folder)) for folder in folders]
    warm = [line for stage in lines for line in stage[WARMUP_STEPS:]]

    def coefficients(part: str, *names: str) -> tuple[float, ...]:
        features = np.array([[1.0, *(line[name] for name in names)] for line in warm])
        return tuple(map(float, fit_relative(features, np.array([line[part] for line in warm]))))

    starts: dict[bool, list[float]] = {True: [], False: []}  # by whether the stage had checks of a long run
    for stage, total in zip(lines, seconds, strict=True):
        typical = sum(median(line[part] for line in stage[WARMUP_STEPS:]) for part in STEP_PARTS)
        starts[len(stage) >= MIN_LONG_RUN_STEPS].append(total - len(stage) * typical)
    start, checked = median(starts[False]), median(starts[True])
    return {
        "update": coefficients("learning", "tokens", "episodes", "pairs"),
        "recording": coefficients("other", "recorded", "answers", "episodes"),
        "scoring": coefficients("scoring", "answers", "episodes"),
        "start": start,
        "checks": max(0.0, checked - start),
    }


def _read_steps(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the timings and counts of each step. `tokens` and `pairs` count only groups with a gradient."""
    for line in read_json_lines(folder / "timings.jsonl"):
        episodes = list(read_episodes(folder / "episodes" / f"step-{line['step']:06d}.parquet"))
        groups = [
            GroupShape.from_episodes(list(part)) for _, part in groupby(episodes, lambda item: item.group_id)
        ]
        live = [group for group in groups if group.live]
        yield {
            **line,
            "tokens": sum(group.fed for group in live),
            "pairs": sum(group.pairs for group in live),
            "recorded": sum(group.recorded for group in groups),
            "answers": sum(group.turns for group in groups),
            "episodes": len(episodes),
        }
