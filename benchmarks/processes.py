"""Compare two processes of one thread with one process of two threads, in the RL stage of the quickstart.

    python benchmarks/processes.py --rounds 3

The benchmark makes a cold start once. Then every round runs the first steps of the climb in each arm, one arm
after the other, with the code of `perilune worker`. It records the seconds per step, in total and by part, as
a median without the first two steps; the CPU seconds of the leading process; the load of the machine before
each run, without which the seconds mean little; and whether all arms wrote the same figures, byte for byte.
Writes results/processes.json.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perilune.bundle.freeze import freeze
from perilune.bundle.job import InputReference, Job, Resources
from perilune.bundle.machine import describe_machine
from perilune.execution.worker import run_bundle
from perilune.files import read_json_lines
from perilune.recipe.load import bundled_recipe, load_recipe
from perilune.recipe.schema import build_job

HERE = Path(__file__).resolve().parent
ARMS = {
    "1 process x 1 thread": (1, 1),
    "1 process x 2 threads": (1, 2),
    "2 processes x 1 thread": (2, 1),
}
WARM = 2  # first steps, which do not count
PARTS = ("sampling", "scoring", "learning", "other")
OVERRIDES = ("traces.traces=6000", "sft.steps=150")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "processes.json")
    arguments = parser.parse_args()
    overrides = (*OVERRIDES, f"rl.steps={arguments.steps}", f"rl.token_budget={arguments.token_budget}")
    recipe = load_recipe(bundled_recipe("quickstart"), overrides)
    jobs = {stage.name: build_job(recipe, stage) for stage in recipe.stages}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    figures = set()
    with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as folder:
        root = Path(folder)
        traces = run(jobs["traces"], {}, root / "traces") / "artifacts" / "traces"
        sft = run(jobs["sft"], {"data": ("dataset", traces)}, root / "sft")
        start = {"checkpoint": ("checkpoint", sft / "artifacts" / "checkpoints" / "final")}
        for number in range(arguments.rounds):
            for name, (processes, threads) in ARMS.items():
                resources = Resources(device="cpu", threads=threads, processes=processes)
                job = jobs["rl"].model_copy(update={"resources": resources})
                load = os.getloadavg()[0]
                bundle = run(job, start, root / f"{number}-{processes}-{threads}")
                figures.add((bundle / "artifacts" / "metrics.jsonl").read_bytes())
                runs[name].append({"load average before": round(load, 1), **seconds(bundle)})
    document = {
        "title": "GRPO step time: two threads or two processes",
        "about": "In each round, every setting runs the `rl` stage of the quickstart once. The table shows "
        "times of a step. *CPU* is the CPU time of the first training process, without scoring. Other "
        "programs kept the cores busy, so elapsed times are noisy.",
        "command": shlex.join(["python", "benchmarks/processes.py", *sys.argv[1:]]),
        "processor": describe_machine()["processor"]["model"],
        "all settings gave the same metrics": len(figures) == 1,
        "seconds per step": {
            name: {
                part: [row[part] for row in rows] for part in ("load average before", "total", "CPU", *PARTS)
            }
            for name, rows in runs.items()
        },
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def run(job: Job, inputs: Mapping[str, tuple[Any, Path]], bundle: Path) -> Path:
    """Freeze and run a job, and return its bundle."""
    references = tuple(
        InputReference(name=name, path=f"inputs/{name}", digest="", kind=kind)
        for name, (kind, _) in inputs.items()
    )
    job = job.model_copy(update={"inputs": references})
    freeze(job, {name: path for name, (_, path) in inputs.items()}, bundle)
    verdict = run_bundle(bundle, 1)
    if not verdict.succeeded:
        raise SystemExit(f"{bundle.name}: {verdict.message}")
    return bundle


def seconds(bundle: Path) -> dict[str, float]:
    """Medians over the steps of a run."""
    lines = list(read_json_lines(bundle / "artifacts" / "timings.jsonl"))[WARM:]
    medians = {part: statistics.median(line[part] for line in lines) for part in PARTS}
    medians = {"CPU": statistics.median(line["processor"] for line in lines)} | medians
    whole = statistics.median(sum(line[part] for part in PARTS) for line in lines)
    return {name: round(value, 3) for name, value in {"total": whole, **medians}.items()}


if __name__ == "__main__":
    main()
