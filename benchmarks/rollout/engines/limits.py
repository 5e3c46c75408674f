"""Highest rates of the cores for matrix products and for reading memory."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SIZES = ((1024, 1024, 1024), (256, 768, 2304))  # rows, inner, columns
READ = torch.zeros(64 << 20)  # 256 MiB: far beyond any cache
REPEATS = 5

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@torch.inference_mode()
def measure() -> dict[str, Any]:
    """FLOP/s of the fastest product by dtype, and bytes/s of a sum over uncached data."""
    product = {}
    for dtype in (torch.float32, torch.bfloat16):
        rates = [
            2 * rows * inner * columns / _least(call)
            for rows, inner, columns in SIZES
            for call in _products(
                torch.randn(rows, inner, dtype=dtype), torch.randn(columns, inner, dtype=dtype)
            )
        ]
        product[str(dtype).removeprefix("torch.")] = max(rates)
    return {"product": product, "read": READ.numel() * 4 / _least(READ.sum)}


def _products(x: Tensor, weight: Tensor) -> list[Callable[[], Tensor]]:
    """Ways to multiply: torch's own, and oneDNN's with its weight in blocks."""
    ways: list[Callable[[], Tensor]] = [lambda: F.linear(x, weight)]
    if torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, x.shape[0])
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))
    return ways


def _least(call: Callable[[], Tensor]) -> float:
    """Seconds of the fastest of some calls, after a warm-up call."""
    call()
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times)
