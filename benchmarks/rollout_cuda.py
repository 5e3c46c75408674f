"""Compare rollouts on a GPU: our engine and compiled `generate` of transformers with its static cache.

    python benchmarks/rollout_cuda.py                    shapes S, M and L in bfloat16: about half an hour
    python benchmarks/rollout_cuda.py --models M --workloads group
    python benchmarks/rollout_cuda.py --smoke --out smoke.json    a tiny shape on the CPU, without graphs

Both do the same work from the same random weights, in turns, with the log-prob of every token. The benchmark
reports tokens per second from end to end, the time of a step, and the share of the GPU's kernels in it, which
PyTorch's profiler measures in a separate round. It first checks that greedy tokens agree. CUDA events time
the attention of a decoding step separately. Without a GPU it exits with 2.
"""

import argparse
import gc
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from perilune.engine.cache import PagedCache
from perilune.engine.decode_step import DecodeAttention, GatheredAttention, TritonAttention
from perilune.engine.engine import Engine
from perilune.engine.graph_runner import GraphRunner
from perilune.models.attention import AttentionLayer
from perilune.models.checkpoints.loading import load_decoder
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder
from recipe_runs import write
from rollout.checkpoints import checkpoint
from rollout.engines import generate, ours
from rollout.environments import CACHE
from rollout.floor import Limits, floor
from rollout.outcome import agreement, check, drawn_alike
from rollout.shapes import SHAPES, WORK, WORKLOADS, Request, Work, greedy_requests, requests_of

OUT = Path("benchmarks/results/rollout_cuda.json")
ABOUT = (
    "Our engine and `generate` of transformers with its static cache, compiled, sample the same work from "
    "the same random weights on one GPU, in turns, at temperature 1 and with the log-prob of every token. "
    "*group*: several samples of each prompt; *ragged*: requests of different length, all there from the "
    "start; *single*: one sample after a long prompt. A step draws one token of every running sample; "
    "kernels are what the GPU was busy with in it. The floor is what the matrices and the cache take at the "
    "best rates measured on the same GPU."
)
WORK_OF_GPU = {
    "S": Work(32, 16, 256, 256, 32, 512, 1024, 256),
    "M": Work(32, 16, 256, 256, 32, 512, 1024, 256),
    "L": Work(16, 16, 256, 128, 32, 512, 1024, 256),
    "smoke": WORK["smoke"],
}
CONTEXTS = (512, 2048, 8192, 32768)


class Ours(ours.Adapter):
    """Our engine on a device. On a CPU, it runs the step that a GPU captures in graphs."""

    def __init__(self, folder: Path, dtype: str, requests: Sequence[Request], device: str) -> None:
        def runner(decoder: Any, num_blocks: Any) -> GraphRunner:
            return GraphRunner(decoder, num_blocks, attention=attention_on(device))

        samples = sum(request.n for request in requests)
        longest = max(len(request.prompt) + request.new_tokens for request in requests)
        decoder = load_decoder(Decoder, folder, device, getattr(torch, dtype))
        self._engine = Engine(decoder, slots=samples, cache_tokens=samples * (longest + 32), runner=runner)

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return int(self._engine.counters.steps)


class Generate(generate.Adapter):
    """`generate` of transformers on a device."""

    steps = 0

    def __init__(self, folder: Path, dtype: str, requests: Sequence[Request], device: str) -> None:
        super().__init__(folder, dtype, torch.get_num_threads(), requests, "static", device)

    def sample(self, requests: Sequence[Request], *, temperature: float, seed: int) -> Any:
        """Sample, and count the steps."""
        self.steps += max(request.new_tokens for request in requests)
        return super().sample(requests, temperature=temperature, seed=seed)


REFERENCE = "transformers, static cache"
ENGINES: dict[str, Callable[..., Any]] = {"perilune": Ours, REFERENCE: Generate}
GREEDY_LIMIT = {"float32": 1e-3, "bfloat16": 0.1}  # nats, before the first greedy token that differs


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = [name for name in WORK_OF_GPU if name != "smoke"]
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3, help="rounds that count, after one that warms up")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape in float32 on the CPU")
    chosen = parser.parse_args()
    if chosen.smoke:
        chosen.models, chosen.repeats = ["smoke"], 1
    elif lacks_gpu():
        return 2
    device, dtype = ("cpu", "float32") if chosen.smoke else ("cuda", "bfloat16")
    limits = measure_limits(device, dtype)
    tables: dict[str, list[dict[str, Any]]] = {workload: [] for workload in chosen.workloads}
    wrong = 0
    for model in chosen.models:
        for workload, rows in tables.items():
            for row in measure(model, workload, dtype, device, chosen.repeats, limits):
                rows.append(row)
                wrong += bool(row["faults"])
                print(f"{workload} {json.dumps(row)}", flush=True)
    document = {
        "title": "Rollouts on a GPU",
        "about": ABOUT,
        "command": shlex.join(["python", "benchmarks/rollout_cuda.py", *sys.argv[1:]]),
        **tables,
        "attention of a decoding step": attention_rows(device, dtype, (64,) if chosen.smoke else CONTEXTS),
        "work": {name: asdict(WORK_OF_GPU[name]) for name in chosen.models},
        "machine": machine(device, limits, dtype),
    }
    write(chosen.out, document)
    return 1 if wrong else 0


def measure(
    model: str, workload: str, dtype: str, device: str, repeats: int, limits: Limits
) -> list[dict[str, Any]]:
    """A row for each engine."""
    folder = checkpoint(CACHE / "checkpoints", model, dtype)
    requests = requests_of(WORK_OF_GPU[model], workload, SHAPES[model].vocab)
    engines = {name: make(folder, dtype, requests, device) for name, make in ENGINES.items()}
    greedy = {name: answers_of(engine, greedy_requests(model)) for name, engine in engines.items()}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for seed in range(repeats + 1):
        for name, engine in engines.items():
            rounds[name].append(timed(engine, varied(requests, seed, SHAPES[model].vocab), seed, model))
    rows = []
    least = floor(SHAPES[model], requests, dtype, limits)
    for name, engine in engines.items():
        counted = rounds[name][1:]
        seconds = statistics.median(result["seconds"] for result in counted)
        faults = sorted({fault for result in rounds[name] for fault in result["faults"]})
        alike = agreement(greedy[name], greedy[REFERENCE])
        if not drawn_alike(counted[-1], rounds[REFERENCE][-1]):
            faults.append("log-probs of another distribution")
        if not (alike["logprob_difference"] or 0.0) <= GREEDY_LIMIT[dtype]:
            faults.append("greedy tokens with other log-probs")
        kernels = kernel_milliseconds(engine, varied(requests, repeats + 1, SHAPES[model].vocab), device)
        rows.append(
            {
                "model": model,
                "engine": name,
                "tokens_per_second": counted[-1]["tokens"] / seconds,
                "step_ms": 1e3 * seconds / counted[-1]["steps"],
                "kernel_ms": kernels,
                "steps": counted[-1]["steps"],
                "share_of_floor": (least.prefill + least.decode + least.cache) / seconds,
                "peak_gb": max(result["peak_gb"] for result in rounds[name]),
                "first_round_seconds": rounds[name][0]["seconds"],
                "seconds": [result["seconds"] for result in counted],
                "greedy_agreement": alike["tokens"],
                "greedy_logprob_difference": alike["logprob_difference"],
                "faults": faults,
            }
        )
    engines.clear()
    release(device)
    return rows


def answers_of(engine: Any, requests: Sequence[Request]) -> dict[str, Any]:
    """Greedy tokens and log-probs as plain lists."""
    outcome = engine.sample(requests, temperature=0.0, seed=0)
    return {
        "tokens": [[int(token) for token in sample] for sample in outcome.tokens],
        "logprobs": [[float(value) for value in sample] for sample in outcome.logprobs],
    }


def timed(engine: Any, requests: Sequence[Request], seed: int, model: str) -> dict[str, Any]:
    """One round."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    steps, begun = engine.steps, time.perf_counter()
    outcome = engine.sample(requests, temperature=1.0, seed=seed)
    seconds = time.perf_counter() - begun
    faults, figures = check(requests, outcome, SHAPES[model].vocab)
    peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0
    return {
        "seconds": seconds,
        "steps": engine.steps - steps,
        "faults": faults,
        "peak_gb": peak,
        **figures,
    }


def kernel_milliseconds(engine: Any, requests: Sequence[Request], device: str) -> float:
    """Busy milliseconds of the device per step, in a round under the profiler."""
    kinds = torch.profiler.ProfilerActivity
    steps = engine.steps
    with torch.profiler.profile(activities=[kinds.CPU if device == "cpu" else kinds.CUDA]) as profiler:
        engine.sample(requests, temperature=1.0, seed=0)
    events = profiler.key_averages()
    took = sum(row.self_cpu_time_total if device == "cpu" else row.self_device_time_total for row in events)
    return took / 1e3 / (engine.steps - steps)


def attention_rows(device: str, dtype: str, contexts: Sequence[int]) -> list[dict[str, Any]]:
    """Times and reads of one attention layer: 32 samples, 16 query and 8 key-value heads of 128."""
    config = PRESETS["tiny"].replace(num_layers=1, num_heads=16, num_kv_heads=8, head_dim=128)
    rows, kind, layer = [], getattr(torch, dtype), AttentionLayer(0)
    samples = 2 if device == "cpu" else 32
    for context in contexts:
        columns = context // 16
        cache = PagedCache(config, (1 + samples * columns,), kind, device)
        table = 1 + torch.arange(samples * columns, dtype=torch.int32, device=device).view(samples, columns)
        positions = torch.full((samples,), context - 1, dtype=torch.int32, device=device)
        q, k, v = (
            torch.randn(samples, heads, config.head_dim, dtype=kind, device=device)
            for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        )
        attention = attention_on(device)(cache, [table], positions)
        milliseconds = time_of(lambda attention=attention, q=q, k=k, v=v: attention(q, k, v, layer), device)
        read = cache.nbytes * (1 - 1 / (1 + samples * columns))
        rows.append(
            {"context": context, "milliseconds": milliseconds, "GB_per_second": read / milliseconds / 1e6}
        )
        del cache, attention
        release(device)
    return rows


def lacks_gpu() -> bool:
    """True if there is no CUDA device, after printing a message."""
    if torch.cuda.is_available():
        return False
    print("this machine has no CUDA device; --smoke runs a tiny shape on the CPU", file=sys.stderr)
    return True


def measure_limits(device: str, dtype: str) -> Limits:
    """The highest rates of this device: a large product, and reading a large tensor."""
    size = 512 if device == "cpu" else 8192
    a = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    product = 2 * size**3 / time_of(lambda: a @ a, device) * 1e3
    large = torch.zeros((1 << 22) if device == "cpu" else (1 << 30), dtype=torch.uint8, device=device)
    # Copying reads and writes as many.
    read = 2 * large.nbytes / time_of(large.clone, device) * 1e3
    return Limits({dtype: product}, read)


def time_of(call: Callable[[], Any], device: str, repeats: int = 10) -> float:
    """Median milliseconds after a warm-up call. On a GPU, CUDA events measure them."""
    call()
    times = []
    for _ in range(repeats):
        if device == "cpu":
            begun = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - begun))
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def varied(requests: Sequence[Request], seed: int, vocab: int) -> list[Request]:
    """The same work on other prompts, so that caches of earlier rounds do not help."""
    return [
        Request([(token + seed) % vocab for token in old.prompt], old.n, old.new_tokens) for old in requests
    ]


def attention_on(device: str) -> DecodeAttention:
    """Our kernel on a GPU, or its reference implementation where Triton cannot run."""
    return GatheredAttention if device == "cpu" else TritonAttention


def release(device: str) -> None:
    """Free the device memory before the next measurement."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def machine(device: str, limits: Limits, dtype: str) -> dict[str, Any]:
    """Machine and versions of the measurement."""
    import transformers

    import perilune

    name = platform.processor() if device == "cpu" else torch.cuda.get_device_name()
    return {
        "device": name,
        "TFLOP_per_second": limits.product[dtype] / 1e12,
        "GB_per_second": limits.read / 1e9,
        "dtype": dtype,
        "perilune": perilune.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
