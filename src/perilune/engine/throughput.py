"""Measures the sampling speed of the engine on this machine, on rollouts like those of training."""

import contextlib
import time
from dataclasses import dataclass

import numpy as np

from perilune.engine.engine import Engine
from perilune.engine.request import Prompt, SamplingParams
from perilune.models.decoder import Decoder

_SAMPLES = 8  # of each prompt


@dataclass(frozen=True, slots=True)
class Throughput:
    """Sampled tokens, wall-clock seconds and CPU seconds. The times include prefill, the tokens do not.

    Attributes:
        cpu_seconds: CPU time of all threads of the process.
    """

    tokens: int
    seconds: float
    cpu_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second."""
        return self.tokens / self.seconds


def measure_throughput(decoder: Decoder, *, seconds: float, groups: int = 32) -> Throughput:
    """Sample `groups` prompts of 8 tokens, 8 times each with 40 tokens, repeatedly for `seconds`.

    Samples never stop early, so every round is the same work. A short warm-up round, which allocates memory
    and selects kernels, is not counted. The last round is cut off when the time is over.
    """
    engine = Engine(decoder, slots=groups * _SAMPLES)
    ids = np.random.default_rng(0).integers(decoder.config.vocab_size, size=(groups, 8)).tolist()
    prompts = [Prompt(row, (0, 0, group)) for group, row in enumerate(ids)]
    engine.sample(prompts, _SAMPLES, SamplingParams(max_tokens=2))

    tokens = 0
    start, began = time.perf_counter(), time.process_time()

    def count(finished: int, total: int) -> None:
        nonlocal tokens
        tokens += total  # all samples are in flight, and each gained one token
        if time.perf_counter() - start >= seconds:
            raise _TimeUpError

    with contextlib.suppress(_TimeUpError):
        while True:
            engine.sample(prompts, _SAMPLES, SamplingParams(max_tokens=40), count)
    return Throughput(tokens, time.perf_counter() - start, time.process_time() - began)


class _TimeUpError(Exception):
    pass
