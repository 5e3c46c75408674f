"""Compare group sampling of our engine and of `transformers` generate, with the same checkpoint and cores.

The two take turns and sample at temperature 1 from float32 weights: first until every sample has the same
number of tokens, then until each sample has a stop token, as answers do. Our engine always returns the
log-prob of every sampled token; generate runs without them, which is faster, and with them. Wall seconds are
the time that a user waits. CPU seconds remain meaningful on a busy machine.

    python benchmarks/engine_vs_generate.py [--repeats 7] [--out benchmarks/results/engine_vs_generate.json]
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import perilune
from perilune.engine.engine import Engine
from perilune.engine.request import Prompt, SamplingParams
from perilune.models.checkpoints.loading import load_decoder, new_model, save_checkpoint
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer

PROMPT_TOKENS, NEW_TOKENS = 8, 40
STOPS = (1, 2, 3, 4, 5, 6)
WORKLOADS = ((16, 16, ()), (32, 8, ()), (32, 8, STOPS))
Sampler = Callable[[int], int]
"""Samples once with the random numbers of a step, and returns how many tokens came out."""


def engine_sampler(path: Path, prompts: Sequence[Sequence[int]], n: int, stops: tuple[int, ...]) -> Sampler:
    """A sampler of our engine, which computes each group's prompt once and refills free slots."""
    engine = Engine(load_decoder(Decoder, path), slots=len(prompts) * n)
    params = SamplingParams(max_tokens=NEW_TOKENS, stop_token_ids=stops)

    def sample(step: int) -> int:
        groups = engine.sample([Prompt(list(p), (0, step, i)) for i, p in enumerate(prompts)], n, params)
        return sum(len(answer.token_ids) for group in groups for answer in group)

    return sample


def generate_sampler(
    path: Path, prompts: Sequence[Sequence[int]], n: int, stops: tuple[int, ...], *, logprobs: bool
) -> Sampler:
    """A sampler of `generate`, which repeats prompts n times and runs until all samples end."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    inputs = torch.tensor(prompts)
    settings: dict[str, Any] = {
        "attention_mask": torch.ones_like(inputs),
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": NEW_TOKENS,
        "eos_token_id": list(stops) or None,
        "pad_token_id": 0,
        "num_return_sequences": n,
        "return_dict_in_generate": True,
        "output_logits": logprobs,
    }

    @torch.inference_mode()
    def sample(step: int) -> int:
        torch.manual_seed(step)
        out = model.generate(inputs, **settings)
        tokens = out.sequences[:, PROMPT_TOKENS:]
        if logprobs:
            torch.stack(out.logits, dim=1).log_softmax(-1).gather(-1, tokens[..., None])
        ended = torch.isin(tokens, torch.tensor(stops, dtype=torch.int64)).cumsum(-1)
        return int((ended.roll(1, -1).index_fill_(-1, torch.tensor([0]), 0) == 0).sum())

    return sample


def measure(
    path: Path, groups: int, n: int, stops: tuple[int, ...], threads: int, repeats: int
) -> dict[str, Any]:
    """Medians over interleaved repeats, so that other load affects all samplers alike."""
    torch.set_num_threads(threads)
    prompts = np.random.default_rng(0).integers(7, 98, size=(groups, PROMPT_TOKENS)).tolist()
    samplers = {
        "engine": engine_sampler(path, prompts, n, stops),
        "generate": generate_sampler(path, prompts, n, stops, logprobs=False),
        "generate_with_logprobs": generate_sampler(path, prompts, n, stops, logprobs=True),
    }
    wall: dict[str, list[float]] = {name: [] for name in samplers}
    processor: dict[str, list[float]] = {name: [] for name in samplers}
    tokens: dict[str, int] = dict.fromkeys(samplers, 0)
    for step in range(repeats + 1):
        for name, sample in samplers.items():
            begun = time.perf_counter(), time.process_time()
            count = sample(step)
            if step:  # the first round warms up
                wall[name].append((time.perf_counter() - begun[0]) / count)
                processor[name].append((time.process_time() - begun[1]) / count)
                tokens[name] += count
    return {
        "prompts": groups,
        "samples": n,
        "ends": "at a stop token" if stops else f"after {NEW_TOKENS} tokens",
        "threads": threads,
        "tokens_a_sample": {name: round(count / repeats / groups / n, 2) for name, count in tokens.items()},
        "tokens_per_second": {name: round(1 / statistics.median(times)) for name, times in wall.items()},
        "tokens_per_processor_second": {
            name: round(1 / statistics.median(times)) for name, times in processor.items()
        },
        "times_as_fast_as_generate": {
            "wall": _times_as_fast(wall),
            "processor": _times_as_fast(processor),
        },
    }


def _times_as_fast(times: dict[str, list[float]]) -> float:
    """Median of the ratio over the rounds, each of which ran both."""
    return round(statistics.median(b / a for a, b in zip(times["engine"], times["generate"], strict=True)), 2)


def main() -> None:
    """Run every workload and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/engine_vs_generate.json"))
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        tokenizer = Tokenizer.characters()
        decoder = new_model("tiny", tokenizer, seed=0)
        save_checkpoint(path, decoder, tokenizer)
        for threads in arguments.threads:
            for workload in WORKLOADS:
                results.append(measure(path, *workload, threads, arguments.repeats))
                print(json.dumps(results[-1]))
    report = {
        "command": shlex.join(["python", *sys.argv]),
        "model": {"preset": "tiny", "parameters": sum(p.numel() for p in decoder.parameters())},
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "versions": {
            "perilune": perilune.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "load": os.getloadavg()},
        "results": results,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
