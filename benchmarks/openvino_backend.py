"""Compare the engine with OpenVINO and with Perilune's own kernels, in alternation on the same cores.

Both decode the same prompts greedily. The benchmark then compares OpenVINO's log-probs with those of the
kernels, times fifty weight updates and records the memory of the process, and trains the quickstart with
OpenVINO as its sampler.

    perilune model fetch smollm2-135m
    python benchmarks/openvino_backend.py [--model smollm2-135m] [--repeats 3]
"""

import argparse
import json
import statistics
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from perilune.control.record.home import Home
from perilune.engine.engine import Engine
from perilune.engine.native_runner import NativeRunner
from perilune.engine.openvino_runner import OpenVino
from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.models.checkpoints.loading import load_checkpoint
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder
from recipe_runs import HERE, document, mean_pass_rate, run_recipe, write

PROMPT, TOKENS, BATCHES, UPDATES = 32, 16, (1, 8, 64), 50
RUNNERS: dict[str, dict[str, Any]] = {
    "float32": {"Perilune": NativeRunner, "OpenVINO": OpenVino()},
    "int8": {
        "Perilune": partial(NativeRunner, weights="int8", cache="int8"),
        "OpenVINO": OpenVino(weights="int8", cache="u8"),
    },
}
LESS = ("base.tasks=16", "after_sft.tasks=64", "after_rl.tasks=64")
SMALLER = ("traces.traces=6000", "sft.steps=300", "rl.steps=40", "rl.prompts=16", *LESS)
PARTS = (*RUNNERS, "updates", "training")
TITLE = "Sampling speed: OpenVINO against Perilune's kernels"
ABOUT = f"""\
The two take turns. Each samples {TOKENS} tokens after a prompt of {PROMPT} tokens, greedily. Compare CPU
times, because other programs used the machine too. In
the rows `int8`, each engine quantizes weights and KV cache in its own format. For the row `training`,
OpenVINO samples in the rl stage of a shortened quickstart. In the row `weight updates`, `this model` is
SmolLM2-135M and `base` is the preset `base`."""


def prompts(vocabulary: int, count: int, seed: int) -> list[Prompt]:
    """Random prompts that differ between rounds, so that no round hits the prefix cache of another."""
    tokens = np.random.default_rng(seed).integers(0, vocabulary, (count, PROMPT))
    return [Prompt(row.tolist(), (0, seed, index)) for index, row in enumerate(tokens)]


def compare(decoder: Decoder, weights: str, repeats: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Tokens per second by batch and engine, and how well the samples of both agree."""
    engines = {
        name: Engine(decoder, slots=64, cache_tokens=64 * 128, runner=runner)
        for name, runner in RUNNERS[weights].items()
    }
    rows = [speed(engines, decoder.config.vocab_size, weights, batch, repeats) for batch in BATCHES]
    return rows, agree(engines, decoder.config.vocab_size)


def speed(
    engines: dict[str, Engine], vocabulary: int, weights: str, batch: int, repeats: int
) -> dict[str, Any]:
    """Tokens per CPU second and per second of elapsed time, one figure per round."""
    processor: dict[str, list[float]] = {name: [] for name in engines}
    elapsed: dict[str, list[float]] = {name: [] for name in engines}
    for seed in range(repeats + 1):
        for name, engine in engines.items():
            begun = time.process_time(), time.perf_counter()
            engine.sample(prompts(vocabulary, batch, seed), 1, SamplingParams(TOKENS, 0.0))
            if seed:  # the first round warms up
                processor[name].append(round(batch * TOKENS / (time.process_time() - begun[0]), 1))
                elapsed[name].append(round(batch * TOKENS / (time.perf_counter() - begun[1]), 1))
    ratio = [b / a for a, b in zip(processor["Perilune"], processor["OpenVINO"], strict=True)]
    return {
        "weights": weights,
        "batch": batch,
        "tokens per CPU second, OpenVINO / Perilune": round(statistics.median(ratio), 2),
        **{f"{name}, tokens per CPU second": processor[name] for name in engines},
        **{f"{name}, tokens per second": elapsed[name] for name in engines},
    }


def agree(engines: dict[str, Engine], vocabulary: int) -> dict[str, Any]:
    """Number of greedy tokens before the first difference, and the largest log-prob gap in nats."""
    inputs = prompts(vocabulary, 8, 99)
    greedy = [
        [answer.token_ids for (answer,) in engine.sample(inputs, 1, SamplingParams(2 * TOKENS, 0.0))]
        for engine in engines.values()
    ]
    same = [int(np.cumprod(a == b).sum()) for a, b in zip(*greedy, strict=True)]
    sampled: list[Completion] = [
        answer for (answer,) in engines["OpenVINO"].sample(inputs, 1, SamplingParams(2 * TOKENS))
    ]
    scores = engines["Perilune"].score(
        [prompt.token_ids for prompt in inputs], [answer.token_ids.tolist() for answer in sampled]
    )
    gaps = [np.abs(score - answer.logprobs) for score, answer in zip(scores, sampled, strict=True)]
    return {
        "greedy tokens equal": f"{sum(same)} of {8 * 2 * TOKENS}",
        "largest gap of log-probs, nats": float(f"{np.max(gaps):.2g}"),
    }


def updates(decoder: Decoder) -> dict[str, Any]:
    """CPU time of an update of `decoder`, and the process's memory over updates of a smaller model."""
    figures: dict[str, Any] = {}
    for name, model, count in (("this model", decoder, 3), ("base", base(), UPDATES)):
        engine = Engine(model, slots=8, cache_tokens=1024, runner=OpenVino())
        seconds, memory = [], []
        for number in range(1, count + 1):
            with torch.no_grad():
                model.model.norm.weight.mul_(1.001)
            begun = time.process_time()
            engine.update_weights(None, number)
            seconds.append(time.process_time() - begun)
            engine.sample(prompts(model.config.vocab_size, 1, number), 1, SamplingParams(2, 0.0))
            if number % 10 == 0:
                memory.append(psutil.Process().memory_info().rss >> 20)
        figures[f"CPU seconds per update, {name}"] = round(statistics.median(seconds), 2)
    sizes = ", ".join(f"{size:,}" for size in memory)
    return {**figures, f"resident MiB after 10, 20, ... {UPDATES} updates, base": sizes}


def base() -> Decoder:
    """A new model of 3 million parameters."""
    decoder = Decoder(PRESETS["base"])
    decoder.initialize(0)
    return decoder


def climb() -> dict[str, Any]:
    """Run the quickstart with OpenVINO as the sampler of its rl stage."""
    stages = run_recipe(Path("quickstart"), 0, [*SMALLER, "rl.engine=openvino"])
    steps = [line for line in stages["rl"]["metrics"] if "logprob_gap_max" in line]
    return {
        "pass@1 after SFT": round(mean_pass_rate(stages["after_sft"]), 3),
        "pass@1 after RL": round(mean_pass_rate(stages["after_rl"]), 3),
        "steps": len(steps),
        "largest gap to the learner, nats": float(f"{max(line['logprob_gap_max'] for line in steps):.2g}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="a folder, or the name of a fetched model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="parts to measure; the results of the others are kept",
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "openvino.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    previous = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    folder = Path(arguments.model)
    if not folder.is_dir():
        folder = Home.open().root / "models" / arguments.model
    if arguments.parts != ["training"]:
        decoder, _ = load_checkpoint(folder, torch.device("cpu"))
    for weights in set(RUNNERS) & set(arguments.parts):
        rows, agreement = compare(decoder, weights, arguments.repeats)
        others = [row for row in previous.get("speed", []) if row["weights"] != weights]
        previous["speed"] = sorted(others + rows, key=lambda row: row["weights"])
        previous["agreement"] = {**previous.get("agreement", {}), weights: agreement}
    if "updates" in arguments.parts:
        previous["weight_updates"] = updates(decoder)
    if "training" in arguments.parts:
        previous["training"] = climb()
    described = document("openvino_backend.py", [], began)
    described["versions"]["openvino"] = version("openvino").partition("-")[0]
    write(arguments.out, previous | {"title": TITLE, "about": ABOUT, **described})


if __name__ == "__main__":
    main()
