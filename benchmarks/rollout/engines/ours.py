"""Our engine."""

import functools
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import perilune
from perilune.engine.blocks import BLOCK, blocks_for
from perilune.engine.engine import Engine
from perilune.engine.native_runner import NativeRunner
from perilune.engine.request import Request as EngineRequest
from perilune.engine.request import SamplingParams
from perilune.engine.select_runner import fastest_runner
from perilune.models.checkpoints.stored import open_decoder

from ..outcome import Outcome
from ..shapes import Request


class Adapter:
    """Adds all requests at once, and steps the engine until the last one ends."""

    log_probs = "every token"

    def __init__(
        self,
        checkpoint: Path,
        dtype: str,
        threads: int,
        requests: Sequence[Request],
        cache: str | None = None,
    ) -> None:
        torch.set_num_threads(threads)
        decoder = open_decoder(checkpoint, dtype=getattr(torch, dtype))
        runner = functools.partial(NativeRunner, cache=cache) if cache else fastest_runner
        self.kv_cache = cache or dtype
        self._engine = Engine(
            decoder,
            slots=sum(request.n for request in requests),
            cache_tokens=sum(
                _whole_blocks(len(r.prompt)) + r.n * _whole_blocks(r.new_tokens) for r in requests
            ),
            runner=runner,
        )

    def versions(self) -> dict[str, str]:
        """Versions of the packages."""
        versions = {"perilune": perilune.__version__, "torch": torch.__version__}
        return {**versions, "python": platform.python_version()}

    def sample(self, requests: Sequence[Request], *, temperature: float, seed: int) -> Outcome:
        """Sample all requests. A single request arrives token by token, which shows its first token."""
        engine, alone = self._engine, len(requests) == 1
        places: dict[int, int] = {}
        count = 0
        for index, request in enumerate(requests):
            params = SamplingParams(max_tokens=request.new_tokens, temperature=temperature)
            wanted = EngineRequest(list(request.prompt), params, (0, seed, index), request.n)
            places[engine.add(wanted, stream=alone)] = count
            count += request.n
        tokens: list[list[int]] = [[] for _ in range(count)]
        logprobs: list[list[float]] = [[] for _ in range(count)]
        first = None
        while engine.unfinished:
            for delta in engine.step():
                first = first or time.perf_counter()
                position = places[delta.request_id] + delta.sample
                tokens[position] += delta.token_ids
                logprobs[position] += delta.logprobs
        return Outcome(tokens, logprobs, first if alone else None)

    def split(self, requests: Sequence[Request], seed: int) -> dict[str, Any]:
        """Mean time of each part of a step in ms, measured in a separate round."""
        times: dict[str, float] = defaultdict(float)
        engine: Any = self._engine
        parts = {
            "schedule": [(engine._scheduler, "schedule"), (engine._scheduler, "commit")],
            "run": [(engine._runner, "run"), (engine._runner, "copy_blocks")],
            "draw": [(engine._sampler, "draw")],
        }
        for part, calls in parts.items():
            for owner, name in calls:
                setattr(owner, name, _timed(getattr(owner, name), part, times))
        steps, begun = engine.counters.steps, time.perf_counter()
        self.sample(requests, temperature=1.0, seed=seed)
        seconds, steps = time.perf_counter() - begun, engine.counters.steps - steps
        for calls in parts.values():
            for owner, name in calls:
                delattr(owner, name)  # restores the method of the class
        times["rest"] = seconds - sum(times.values())
        return {"steps": steps, **{part: 1e3 * value / steps for part, value in times.items()}}


def _whole_blocks(tokens: int) -> int:
    """Tokens in the blocks that hold `tokens` tokens, and in one more block."""
    return (blocks_for(tokens) + 1) * BLOCK


def _timed(call: Callable[..., Any], part: str, spent: dict[str, float]) -> Callable[..., Any]:
    def timed(*arguments: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            spent[part] += time.perf_counter() - begun

    return timed
