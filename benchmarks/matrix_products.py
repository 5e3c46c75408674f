"""Compare matrix products of the C kernels and of torch, in GFLOP/s of one thread.

    python benchmarks/matrix_products.py

Each round measures all of them in turn, in CPU time, so that other programs matter little. The sizes are
those of a tiny model and of SmolLM2-135M. Writes results/matrix_products.json.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from perilune.bundle.machine import describe_machine
from perilune.models.native import ops
from recipe_runs import HERE, document, write

SIZES = (
    (1, 576, 1536),
    (8, 576, 1536),
    (64, 96, 384),
    (96, 576, 1536),
    (512, 576, 1536),
)  # rows, inputs, outputs
ROUNDS, SECONDS = 15, 0.05
ABOUT = """\
A product multiplies a matrix of *rows* x *inputs* by one of *inputs* x *outputs*. In the columns `bfloat16`
and `int8`, the second matrix is stored in this format. The kernels compute the same bits for a row in every
batch. Speeds are in GFLOP/s of CPU time. They are medians of 15 rounds, each of which measures all products
in turn."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "matrix_products.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    rows = [measure(*size) for size in SIZES]
    write(
        arguments.out,
        {"title": "Matrix products of the C kernels", "about": ABOUT}
        | document("matrix_products.py", sys.argv[1:], began)
        | {"instruction sets": ", ".join(describe_machine()["processor"]["simd"]), "GFLOP/s": rows},
    )


def measure(rows: int, inputs: int, outputs: int) -> dict[str, Any]:
    """Measure all products of one size."""
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    packed = {kind: ops.pack_weight(weight, None, kind) for kind in ("float32", "bfloat16", "int8")}
    products: dict[str, Callable[[], object]] = {
        kind: lambda packed=matrix: ops.linear(x, packed) for kind, matrix in packed.items()
    }
    products["torch"] = lambda: torch.nn.functional.linear(x, weight)
    rounds = [
        {name: speed(product, 2 * rows * inputs * outputs) for name, product in products.items()}
        for _ in range(ROUNDS)
    ]
    medians = {name: round(median(speeds[name] for speeds in rounds), 1) for name in products}
    line = {"rows": rows, "inputs": inputs, "outputs": outputs, **medians}
    print(line, flush=True)
    return line | {
        "speed of float32 kernel / speed of torch": round(medians["float32"] / medians["torch"], 2)
    }


def speed(product: Callable[[], object], operations: int) -> float:
    """GFLOP per second of CPU time."""
    began, count = time.process_time(), 0
    while (seconds := time.process_time() - began) < SECONDS:
        product()
        count += 1
    return operations * count / seconds / 1e9


if __name__ == "__main__":
    main()
