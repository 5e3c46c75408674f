"""Measure rollouts of our engine and its peers on the cores of this machine, and store the results.

    python -m benchmarks.rollout                                       everything, for hours
    python -m benchmarks.rollout --models T --workloads group --cores 1 --engines perilune openvino
    python -m benchmarks.rollout --smoke --out smoke.json              a minute, of ours and transformers

Peers are installed once into separate virtual environments in $PERILUNE_BENCHMARKS, by default
~/.cache/perilune-benchmarks (compiling llama.cpp takes about fifteen minutes). A new result replaces the
result of the same model, workload, weights, cores and engine in the file. All others stay, so you can measure
in parts.
"""

import argparse
import itertools
import os
import signal
import sys
from pathlib import Path

from .environments import ENGINES
from .run import run
from .shapes import DTYPES, WORK, WORKLOADS, Case
from .store import Store, line

OUT = Path("benchmarks/results/rollout.json")
SMOKE_ENGINES = ["perilune", "transformers"]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollout",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    models = [name for name in WORK if name != "smoke"]
    cores = [count for count in (1, 2) if count <= len(os.sched_getaffinity(0))]
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--weights", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--cores", nargs="+", type=int, default=cores)
    parser.add_argument("--engines", nargs="+", choices=[*ENGINES], default=[*ENGINES])
    parser.add_argument("--repeats", type=int, default=3, help="rounds that count, after one that warms up")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, installing nothing")
    parser.add_argument("--list", action="store_true", help="say which cases there are, and measure nothing")
    chosen = parser.parse_args()
    if chosen.smoke:
        chosen.models, chosen.engines, chosen.weights = ["smoke"], SMOKE_ENGINES, ["float32"]
        chosen.cores, chosen.repeats = [1], 1
    cases = [
        Case(*choice)
        for choice in itertools.product(chosen.models, chosen.workloads, chosen.weights, chosen.cores)
    ]
    if chosen.list:
        print("\n".join(f"{case}: {', '.join(chosen.engines)}" for case in cases))
        return 0
    signal.signal(signal.SIGTERM, _leave)
    store = Store(chosen.out, command=sys.argv[1:])
    wrong = 0
    for case in cases:
        print(case, flush=True)
        for record in run(case, chosen.engines, chosen.repeats, here=chosen.smoke):
            store.keep(record)
            wrong += "failed" in record or bool(record["faults"])
            print(f"  {line(record)}", flush=True)
    return 1 if wrong else 0


def _leave(number: int, _: object) -> None:
    """End the processes of the engines before this one, even after a second signal."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
