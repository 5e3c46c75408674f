"""Run one engine in a separate process, which answers lines of JSON with lines of JSON.

    python -m benchmarks.rollout.worker

reads one line with the engine, the checkpoint and the number of threads. If the line asks to prepare, the
process converts the checkpoint to the engine's own format and ends, so that the conversion does not count as
the engine's memory. Otherwise it loads the checkpoint and samples on request. Apart from the engine, it
imports only the standard library and numpy.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from .outcome import Outcome, check
from .shapes import SHAPES, Request, greedy_requests


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")  # the log gets the output of libraries
    os.dup2(2, 1)
    setup = json.loads(sys.stdin.readline())
    module = importlib.import_module(f"{__package__}.engines.{setup['module']}")
    if setup["prepare"]:
        module.prepare(Path(setup["checkpoint"]))
    elif setup["module"] == "limits":
        _serve(answers, lambda _: module.measure())
    else:
        _serve(answers, _Sampler(module, setup))


def _serve(answers: TextIO, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Send a line when ready, and then answer every line."""
    _say(answers, {})
    for line in sys.stdin:
        _say(answers, answer(json.loads(line)))


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


_ONCE_MORE = 1 << 16  # seed of an extra round, different from all others


class _Sampler:
    """Answers `greedy`, `round` and `about`."""

    def __init__(self, module: Any, setup: dict[str, Any]) -> None:
        self.vocab = SHAPES[setup["model"]].vocab
        self.greedy = greedy_requests(setup["model"])
        self.requests = [Request.from_json(raw) for raw in setup["requests"]]
        begun = time.perf_counter()
        self.engine = module.Adapter(
            Path(setup["checkpoint"]), setup["dtype"], setup["threads"], self.requests, **setup["options"]
        )
        self.load_seconds = time.perf_counter() - begun
        self.load_peak: float | None = None

    def __call__(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["do"] == "greedy":
            outcome: Outcome = self.engine.sample(self.greedy, temperature=0.0, seed=0)
            tokens = [[int(token) for token in sample] for sample in outcome.tokens]
            logprobs = outcome.logprobs and [
                [float(value) for value in sample] for sample in outcome.logprobs
            ]
            return {"tokens": tokens, "logprobs": logprobs}
        if asked["do"] == "about":
            split = getattr(self.engine, "split", None)
            return {
                "kv_cache": self.engine.kv_cache,
                "log_probs": self.engine.log_probs,
                "versions": self.engine.versions(),
                "load_seconds": self.load_seconds,
                "peak_mb": max(self.load_peak or 0.0, _peak_mb()),
                "sampling_peak_mb": _peak_mb(),
                "split_ms": split and split(self._varied(_ONCE_MORE), _ONCE_MORE),
            }
        return self._round(self._varied(asked["seed"]), asked["seed"])

    def _varied(self, seed: int) -> list[Request]:
        """The same work on other prompts, so that caches of earlier rounds do not help."""
        return [
            dataclasses.replace(request, prompt=[(token + seed) % self.vocab for token in request.prompt])
            for request in self.requests
        ]

    def _round(self, requests: list[Request], seed: int) -> dict[str, Any]:
        if self.load_peak is None:
            self.load_peak = _peak_mb()
            _forget_peak()
        begun, used = time.perf_counter(), time.process_time()
        outcome = self.engine.sample(requests, temperature=1.0, seed=seed)
        seconds, used = time.perf_counter() - begun, time.process_time() - used
        faults, figures = check(requests, outcome, self.vocab)
        first = None if outcome.first_token is None else outcome.first_token - begun
        return {
            "seconds": seconds,
            "processor_seconds": used,
            "first_token_seconds": first,
            "faults": faults,
            **figures,
        }


def _peak_mb() -> float:
    """Peak memory of this process in MB of 10^6 bytes, or 0 if unknown."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM"))


def _forget_peak() -> None:
    """Reset the peak to the current memory."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
