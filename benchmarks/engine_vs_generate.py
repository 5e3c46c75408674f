"""Group sampling with our engine against `transformers` generate: same checkpoint, same cores, interleaved.

Both sample at temperature 1 from float32 weights until every sample has the same number of tokens. Ours gives
the log-prob of every sampled token as well; generate is run without (its fastest way) and with.

    python benchmarks/engine_vs_generate.py [--repeats 7] [--out benchmarks/results/engine_vs_generate.json]
"""

from __future__ import annotations

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
from perilune.engine.sampling import Prompt, SamplingParams
from perilune.models.loading import load_decoder, new_model, save_checkpoint
from perilune.models.tokenizer import Tokenizer

WORKLOADS = ((16, 16), (32, 8))
PROMPT_TOKENS, NEW_TOKENS = 8, 40


def engine_sampler(path: Path, prompts: Sequence[Sequence[int]], n: int) -> Callable[[int], int]:
    """Samples once with our engine and returns how many tokens; prompts are computed once a group."""
    engine = Engine(load_decoder(path), slots=len(prompts) * n)
    params = SamplingParams(max_tokens=NEW_TOKENS)

    def sample(step: int) -> int:
        groups = engine.sample([Prompt(list(p), (0, step, i)) for i, p in enumerate(prompts)], n, params)
        return sum(len(one.token_ids) for group in groups for one in group)

    return sample


def generate_sampler(
    path: Path, prompts: Sequence[Sequence[int]], n: int, logprobs: bool
) -> Callable[[int], int]:
    """The same with transformers' generate, its prompts repeated n times."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    inputs = torch.tensor(prompts)
    settings: dict[str, Any] = {
        "attention_mask": torch.ones_like(inputs),
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "num_return_sequences": n,
        "return_dict_in_generate": logprobs,
        "output_logits": logprobs,
    }

    @torch.inference_mode()
    def sample(step: int) -> int:
        torch.manual_seed(step)
        out = model.generate(inputs, **settings)
        if not logprobs:
            return int(out.shape[0] * (out.shape[1] - PROMPT_TOKENS))
        tokens = out.sequences[:, PROMPT_TOKENS:]
        picked = torch.stack(out.logits, dim=1).log_softmax(-1).gather(-1, tokens[..., None])
        return picked.numel()

    return sample


def measure(path: Path, groups: int, n: int, threads: int, repeats: int) -> dict[str, Any]:
    """Medians over interleaved repeats, so that whatever else the machine does falls on all alike."""
    torch.set_num_threads(threads)
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, 98, size=(groups, PROMPT_TOKENS)).tolist()
    samplers = {
        "engine": engine_sampler(path, prompts, n),
        "generate": generate_sampler(path, prompts, n, logprobs=False),
        "generate_with_logprobs": generate_sampler(path, prompts, n, logprobs=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    for step in range(repeats + 1):
        for name, sample in samplers.items():
            start = time.perf_counter()
            assert sample(step) == groups * n * NEW_TOKENS
            if step:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    tokens = groups * n * NEW_TOKENS
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    pairwise = [b / a for a, b in zip(seconds["engine"], seconds["generate"], strict=True)]
    return {
        "prompts": groups,
        "samples": n,
        "threads": threads,
        "tokens_per_second": {name: round(tokens / value) for name, value in medians.items()},
        "seconds": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
        "times_as_fast_as_generate": round(statistics.median(pairwise), 2),
    }


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
            for groups, n in WORKLOADS:
                results.append(measure(path, groups, n, threads, arguments.repeats))
                speeds = results[-1]["tokens_per_second"]
                print(f"{groups} x {n}, {threads} threads:", speeds, results[-1]["times_as_fast_as_generate"])
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
