"""Lower bound on the time of a workload, from its products and reads and the rates of this machine.

Every prompt is computed once, however many samples share it. A step multiplies the token of each running
sample with all matrices and reads the matrices once; it takes as long as the slower of the two. Then it reads
the keys and values of all earlier tokens, in the dtype of the weights. An engine with a smaller cache may
come closer to this bound, or below it. Norms, sampling and everything else count as free.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .shapes import Request, Shape

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Limits:
    """Highest rates of the cores: products in FLOP/s by dtype, reading in bytes/s."""

    product: dict[str, float]
    read: float


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds of the prompts, of the later tokens without their context, and of reading the context."""

    prefill: float
    decode: float
    cache: float


def floor(shape: Shape, requests: Sequence[Request], dtype: str, limits: Limits) -> Floor:
    """The floor of these requests, if all run at once."""
    rate, width = limits.product[dtype], BYTES[dtype]
    weights = shape.parameters * width / limits.read
    kv = 2 * shape.layers * shape.kv_heads * shape.head_dim * width / limits.read  # s per token of context
    attention = 4 * shape.layers * shape.heads * shape.head_dim / rate  # s per token and token of context

    prompts = [len(request.prompt) for request in requests]
    flops = 2 * shape.layer_parameters * sum(prompts) + 2 * shape.head_parameters * len(prompts)
    pairs = sum(length * (length + 1) / 2 for length in prompts)
    prefill = max(flops / rate + attention * pairs, weights)

    decode = cache = 0.0
    for step in range(1, max(request.new_tokens for request in requests)):
        running = [request for request in requests if request.new_tokens > step]
        rows = sum(request.n for request in running)
        context = sum(request.n * (len(request.prompt) + step) for request in running)
        decode += max(2 * shape.parameters * rows / rate, weights)
        cache += kv * context
    return Floor(prefill, decode, cache)
