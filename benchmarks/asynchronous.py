"""Compare RL that samples 0, 1 and 2 steps ahead of training, from the same cold start, for several seeds.

    python benchmarks/asynchronous.py [--seeds 0 1 2]

Runs asynchronous.yaml twice per seed: with an environment that waits, as tools do, and with one that only
computes. Writes results/asynchronous.json.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pyarrow.parquet as pq
from scipy.stats import ks_2samp

from perilune.metrics.across_seeds import compare_over_seeds
from recipe_runs import (
    HERE,
    SEEDS_ARE_THE_UNIT,
    document,
    for_seeds,
    mean_pass_rate,
    options,
    run_recipe,
    write,
)

RECIPE = HERE / "asynchronous.yaml"
ARMS = {"synchronous": 0, "ahead_1": 1, "ahead_2": 2}
PARTS = ("sampling", "scoring", "learning", "other")
ABOUT = f"""\
GRPO trains a tiny model on sums of two and three digits, in 40 steps of 16 groups with 8 answers. The arms of
a seed start from the same SFT checkpoint. In every arm, one process samples and 32 processes run
environments. They differ in `staleness`: 0, 1 or 2. With 0, sampling waits for each update. This is the
synchronous arm.

* The environment `computes` scores answers at once. In the environment `waits`, every answer waits for a
  tool. The waits are lognormal with sigma 1, on average 0.1 s for sums of two digits and 0.3 s for sums of
  three.
* Times are medians over the steps after the first ten.
* The *age* of a token is the number of updates between sampling it and training on it.
* pass@1 is measured on 128 held-out tasks.
* The *KS test* (two-sample Kolmogorov-Smirnov) shows whether an arm trains on other episodes than the
  synchronous arm, which trains on all. It compares the waits of the episodes that each of them trained on. A
  small p means that they differ.
* {SEEDS_ARE_THE_UNIT}"""


def main() -> None:
    arguments = options(__doc__, "asynchronous").parse_args()
    began = time.monotonic()
    rows = for_seeds(measure, arguments.seeds, arguments.jobs)
    write(
        arguments.out,
        report([row for of_seed in rows for row in of_seed])
        | document("asynchronous.py", sys.argv[1:], began),
    )


def measure(seed: int) -> list[dict[str, Any]]:
    """The rows of a seed: each arm in each environment."""
    rows = []
    for environment, seconds in (("waits", 0.1), ("computes", 0.0)):
        with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as home:
            run = run_recipe(RECIPE, seed, [f"environment.seconds={seconds}"], Path(home))
            waits = {arm: trained_waits(run[arm]["folder"]) for arm in ARMS}
            rows += [
                row(seed, environment, arm, run)
                | {"p of the KS test": ks(waits[arm], waits["synchronous"], seconds)}
                for arm in ARMS
            ]
    return rows


def row(seed: int, environment: str, arm: str, run: Mapping[str, Any]) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run[arm]["folder"] / "artifacts" / "timings.jsonl").open()][10:]
    metrics = run[arm]["metrics"]
    return {
        "environment": environment,
        "seed": seed,
        "staleness": ARMS[arm],
        "seconds per step": median(sum(line[part] for part in PARTS) for line in lines),
        "seconds of waiting for rollouts": median(line["sampling"] for line in lines),
        "seconds of learning": median(line["learning"] for line in lines),
        "mean age of tokens, updates": fmean(line.get("staleness", 0.0) for line in metrics),
        "largest age of tokens, updates": max(line.get("staleness_max", 0.0) for line in metrics),
        "pass@1 before": mean_pass_rate(run["before"]),
        "pass@1 after": mean_pass_rate(run[f"after_{arm}"]),
    }


def trained_waits(folder: Path) -> list[float]:
    """The waits of all trained episodes."""
    return [
        dict(pairs)["wait"]
        for path in sorted((folder / "artifacts" / "episodes").glob("step-*.parquet"))
        for pairs in pq.read_table(path, columns=["metrics"])["metrics"].to_pylist()
        if "wait" in dict(pairs)
    ]


def ks(one: Sequence[float], other: Sequence[float], seconds: float) -> float | None:
    return float(ks_2samp(one, other).pvalue) if seconds else None


def listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def report(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def over_seeds(environment: str, staleness: int, name: str) -> list[float]:
        return [
            row[name] for row in rows if row["environment"] == environment and row["staleness"] == staleness
        ]

    findings, differences = [], {}
    for environment in ("waits", "computes"):
        reference = over_seeds(environment, 0, "seconds per step")
        for staleness in (1, 2):
            times = over_seeds(environment, staleness, "seconds per step")
            ratios = [seconds / base for seconds, base in zip(times, reference, strict=True)]
            findings.append(
                f"Where the environment {environment}, a step with staleness {staleness} takes"
                f" {fmean(ratios):.2f} times as long as a synchronous step (by seed {listed(ratios)})."
            )
            before, after = (over_seeds(environment, k, "pass@1 after") for k in (0, staleness))
            differences[f"{environment}, with staleness {staleness}"] = [
                b - a for a, b in zip(before, after, strict=True)
            ]
    tests = compare_over_seeds(differences)
    findings += [
        f"pass@1 in the environment that {name}, against synchronous: {test.describe()}."
        for name, test in tests.items()
    ]
    return {
        "title": "Asynchronous training: time and pass rate by staleness",
        "about": ABOUT,
        "findings": findings,
        "by seed": rows,
    }


if __name__ == "__main__":
    main()
