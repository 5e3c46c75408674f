"""Compare RL with and without a curriculum by pass rate, from the same cold start, for several seeds.

    python benchmarks/curriculum.py [--seeds 0 1 2]

Runs curriculum.yaml. Writes results/curriculum.json.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

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

RECIPE = HERE / "curriculum.yaml"
ARMS = {"uniform": "after_uniform", "drawn": "after_drawn"}
ABOUT = f"""\
A tiny model learns sums of two to six one-digit numbers by RL, after SFT on sums of two and three. Both arms
start from the same SFT checkpoint and take 40 steps of 16 groups with 8 answers each. The arm `uniform`
samples tasks uniformly. The arm `drawn` has the curriculum: it draws tasks by the pass rate of their
difficulty.

* A *live group* has answers with different rewards. Only such a group contributes to the gradient.
* *Effective share of groups* is the effective sample size of the drawn tasks, if they are weighted to
  represent uniform tasks, as a share of the groups.
* The *difficulty* of a sum is 1 for two numbers without a carry, 2 for two numbers with a carry and for three
  numbers, and the number of additions for more.
* pass@1 is measured on 128 held-out tasks, sampled uniformly.
* {SEEDS_ARE_THE_UNIT}"""


def main() -> None:
    arguments = options(__doc__, "curriculum").parse_args()
    began = time.monotonic()
    runs = for_seeds(lambda seed: run_recipe(RECIPE, seed), arguments.seeds, arguments.jobs)
    write(arguments.out, report(arguments.seeds, runs) | document("curriculum.py", sys.argv[1:], began))


def live_share(stage: Mapping[str, Any]) -> float:
    """Mean share of live groups over the steps of an rl stage."""
    return 1 - fmean(line["dead_groups"] for line in stage["metrics"])


def report(seeds: Sequence[int], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    comparisons = compare_over_seeds(
        {
            "live groups": [live_share(run["drawn"]) - live_share(run["uniform"]) for run in runs],
            "pass@1": [
                mean_pass_rate(run["after_drawn"]) - mean_pass_rate(run["after_uniform"]) for run in runs
            ],
        }
    )
    return {
        "title": "A curriculum by pass rate on sums of two to six terms",
        "about": ABOUT,
        "findings": [
            f"Curriculum against uniform sampling, {name}: {comparison.describe()}."
            for name, comparison in comparisons.items()
        ],
        "by seed": [row(seed, arm, run) for seed, run in zip(seeds, runs, strict=True) for arm in ARMS],
        "by difficulty": [
            {"seed": seed, "difficulty": level["difficulty"], "pass@1 before": level["pass@1"]}
            | {f"pass@1 {arm}": after(run, stage, level["difficulty"]) for arm, stage in ARMS.items()}
            for seed, run in zip(seeds, runs, strict=True)
            for level in run["before"]["summary"]["by_difficulty"]
        ],
    }


def row(seed: int, arm: str, run: Mapping[str, Any]) -> dict[str, Any]:
    last = run[arm]["metrics"][-1]
    return {
        "seed": seed,
        "tasks": arm,
        "live groups": live_share(run[arm]),
        "live groups in the first 10 steps": live_share({"metrics": run[arm]["metrics"][:10]}),
        "pass@1 before": mean_pass_rate(run["before"]),
        "pass@1 after": mean_pass_rate(run[ARMS[arm]]),
        "effective share of groups": last.get("uniform/ess"),
    }


def after(run: Mapping[str, Any], stage: str, difficulty: float) -> float | None:
    levels = run[stage]["summary"]["by_difficulty"]
    return next((level["pass@1"] for level in levels if level["difficulty"] == difficulty), None)


if __name__ == "__main__":
    main()
