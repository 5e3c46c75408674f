"""Our engine."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import perilune
from perilune.engine.engine import Engine
from perilune.engine.sampling import Prompt, SamplingParams
from perilune.models.loading import load_decoder

from ..outcome import Outcome
from ..shapes import Request


def prepare(checkpoint: Path) -> None:
    """It reads Hugging Face folders."""


class Adapter:
    """`Engine.sample`, one call for all prompts."""

    log_probs = "every token"

    def __init__(self, checkpoint: Path, dtype: str, threads: int, requests: Sequence[Request]) -> None:
        torch.set_num_threads(threads)
        decoder = load_decoder(checkpoint, dtype=getattr(torch, dtype))
        self.kv_cache = dtype
        self._engine = Engine(decoder, slots=sum(request.n for request in requests))

    def versions(self) -> dict[str, str]:
        """Of what takes part."""
        versions = {"perilune": perilune.__version__, "torch": torch.__version__}
        return {**versions, "python": platform.python_version()}

    def sample(self, requests: Sequence[Request], *, temperature: float, seed: int) -> Outcome:
        """All of one call get as many tokens as the longest; what was not asked for is dropped."""
        first: list[float] = []

        def on_progress(finished: int, total: int) -> None:
            if not first:
                first.append(time.perf_counter())

        longest = max(request.new_tokens for request in requests)
        prompts = [Prompt(list(request.prompt), (0, seed, i)) for i, request in enumerate(requests)]
        params = SamplingParams(max_tokens=longest, temperature=temperature)
        groups = self._engine.sample(prompts, requests[0].n, params, on_progress)
        samples = [
            (one, request.new_tokens)
            for group, request in zip(groups, requests, strict=True)
            for one in group
        ]
        return Outcome(
            [one.token_ids[:wanted] for one, wanted in samples],
            [one.logprobs[:wanted] for one, wanted in samples],
            first[0],
        )
