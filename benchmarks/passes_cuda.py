"""Measure training passes and decoding steps on a GPU: seconds, FLOP/s, bandwidth and memory.

    python benchmarks/passes_cuda.py                 0.6B to 8B with bfloat16 products: about 90 seconds
    python benchmarks/passes_cuda.py --smoke --out smoke.json    a tiny shape on the CPU

Without a GPU it exits with 2.
"""

import argparse
import json
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perilune.engine.engine import Engine
from perilune.engine.request import Prompt, SamplingParams
from perilune.models.adapters.lora import attach_adapter, convert_base
from perilune.models.attention import PackedAttention
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.decoder import Decoder
from perilune.models.logprobs import compute_in_row_chunks, token_logprobs
from perilune.models.memory import learning_bytes
from perilune.models.narrow import Precision
from recipe_runs import write
from rollout.checkpoints import shape_config
from rollout.shapes import SHAPES
from rollout_cuda import lacks_gpu, machine, measure_limits, release

OUT = Path("benchmarks/results/passes_cuda.json")
ABOUT = """\
* A training pass is one forward and one backward pass over *tokens* tokens, in sequences of *sequence*
  tokens, without an optimizer step. Its FLOP/s count 6 FLOPs per weight and token (4 with an adapter) and
  causal attention, but no recomputation.
* *Transient GiB* is the peak memory of a second pass beyond weights and gradients. *Planned GiB* is the
  estimate of `--plan` for it.
* *Share of best rate* is the FLOP/s of the pass divided by those of one large matrix product.
* Decoding samples from prompts of 64 tokens. *GB per second* counts the reads of a step: all weights once,
  and the keys and values of answers of half the length.
* M, L and XL have the shapes of Qwen3-0.6B, 1.7B and 8B."""
PROMPT = 64
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Pass:
    """A training pass over `tokens` tokens in sequences of `length`."""

    model: str
    tokens: int
    length: int
    recompute: bool = False
    precision: Precision = "bfloat16"
    adapter: bool = False


PASSES = (
    Pass("M", 16384, 512),
    Pass("M", 8192, 512, precision="float32"),
    Pass("M", 8192, 512, recompute=True, precision="float32"),
    Pass("L", 8192, 2048),
    Pass("L", 16384, 2048),
    Pass("L", 16384, 2048, recompute=True),
    Pass("XL", 8192, 8192, recompute=True, adapter=True),
)
DECODING = (("L", 64, 512), ("L", 256, 256))  # model, samples, tokens per answer


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU")
    chosen = parser.parse_args()
    if not chosen.smoke and lacks_gpu():
        return 2
    device = "cpu" if chosen.smoke else "cuda"
    limits = measure_limits(device, "bfloat16")
    passes = [Pass("smoke", 128, 32), Pass("smoke", 128, 32, adapter=True)] if chosen.smoke else PASSES
    decoding = [("smoke", 8, 16)] if chosen.smoke else DECODING
    document = {
        "title": "Training passes and decoding on a GPU",
        "about": ABOUT,
        "command": shlex.join(["python", "benchmarks/passes_cuda.py", *sys.argv[1:]]),
        "training": [report(train(work, device), limits.product["bfloat16"], device) for work in passes],
        "decoding": [report(decode(*work, device), limits.read, device) for work in decoding],
        "machine": machine(device, limits, "bfloat16"),
    }
    write(chosen.out, document)
    return 0


def report(row: dict[str, Any], most: float, device: str) -> dict[str, Any]:
    """Print the row with its rate as a share of the highest measured rate, and return it."""
    release(device)
    rate = row.pop("rate")
    row["share_of_best_rate"] = round(rate / most, 3)
    print(json.dumps(row), flush=True)
    return row


def made(model: str, device: str) -> Decoder:
    """Make a decoder with random weights."""
    with torch.device("meta"):
        decoder = Decoder(DecoderConfig.from_hf(shape_config(SHAPES[model], "float32")))
    decoder.to_empty(device=device)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0, 0.02)
    return decoder


def train(one: Pass, device: str) -> dict[str, Any]:
    """Measure seconds, memory and FLOP/s of a training pass."""
    decoder, shape = made(one.model, device), SHAPES[one.model]
    if one.adapter:
        decoder.requires_grad_(False)
        convert_base(decoder, "bfloat16")
        attach_adapter(decoder, TARGETS, 16, 32.0, seed=0)
    decoder.set_precision(one.precision)
    decoder.recompute = one.recompute
    tokens = torch.randint(shape.vocab, (one.tokens,), device=device)
    positions = torch.arange(one.tokens, device=device) % one.length
    bounds = torch.arange(0, one.tokens + 1, one.length, device=device)

    def run() -> None:
        hidden = decoder(tokens, positions, PackedAttention(bounds))
        logprobs, _ = compute_in_row_chunks(
            lambda rows, targets: token_logprobs(decoder.logits(rows), targets), (hidden, tokens), shape.vocab
        )
        logprobs.mean().backward()

    run()
    settle(device)
    before = allocated(device)
    began = time.perf_counter()
    run()
    run()
    settle(device)
    seconds = (time.perf_counter() - began) / 2
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    planned = learning_bytes(
        decoder.config, one.tokens, one.length, recompute=one.recompute, gpu=one.precision
    )
    products = 4 if one.adapter else 6
    weights = shape.layer_parameters + shape.head_parameters
    attended = 6 * shape.layers * shape.heads * shape.head_dim * one.tokens * one.length
    return {
        "model": one.model,
        "precision": one.precision,
        "adapter": one.adapter,
        "recompute": one.recompute,
        "tokens": one.tokens,
        "sequence": one.length,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(one.tokens / seconds),
        "transient_gib": round((peak - before) / 2**30, 2),
        "planned_gib": round(planned / 2**30, 2),
        "rate": (products * weights * one.tokens + attended) / seconds,
    }


def decode(model: str, samples: int, length: int, device: str) -> dict[str, Any]:
    """Measure the milliseconds of a decoding step, and the bytes that it reads per second."""
    decoder, shape = made(model, device), SHAPES[model]
    decoder.set_precision("bfloat16")
    engine = Engine(decoder, slots=samples, cache_tokens=samples * (length + 2 * PROMPT))
    generator = torch.Generator().manual_seed(0)
    of_each = min(samples, 8)
    prompts = [
        Prompt(torch.randint(shape.vocab, (PROMPT,), generator=generator).tolist(), (0, 0, task))
        for task in range(samples // of_each)
    ]
    engine.sample(prompts, of_each, SamplingParams(length))
    settle(device)
    steps, began = engine.counters.steps, time.perf_counter()
    engine.sample(prompts, of_each, SamplingParams(length))
    seconds = time.perf_counter() - began
    steps = engine.counters.steps - steps
    cached = 4 * shape.layers * shape.kv_heads * shape.head_dim * samples * (PROMPT + length // 2)
    weights = shape.layer_parameters + shape.head_parameters
    return {
        "model": model,
        "samples": samples,
        "answer": length,
        "step_ms": round(1e3 * seconds / steps, 2),
        "tokens_per_second": round(samples * length / seconds),
        "rate": (2 * weights + cached) * steps / seconds,
    }


def settle(device: str) -> None:
    """Wait for the GPU, and reset its peak memory."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def allocated(device: str) -> int:
    """Bytes of all tensors on the GPU."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


if __name__ == "__main__":
    sys.exit(main())
