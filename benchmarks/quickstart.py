"""Measure the gain and the duration of the quickstart over several seeds.

    python benchmarks/quickstart.py --seeds 0 1 2

The seeds run `perilune quickstart --json` in turn, each in a new home. Recorded are the three evaluations
with their intervals, the paired gains, the curve of the pass rate, seconds per stage and in total, and the
largest difference between the log-probs of engine and learner. Writes results/quickstart.json.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from perilune.bundle.machine import describe_machine

HERE = Path(__file__).resolve().parent
KEPT = (
    "pass@1",
    "pass@8",
    "greedy",
    "length",
    "truncated",
    "failures",
    "strategies",
    "tokens_per_second",
    "gain",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--set", action="append", default=[], help="override of the recipe, as for `perilune run`"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "quickstart.json")
    arguments = parser.parse_args()
    runs = [quickstart(seed, arguments.set) for seed in arguments.seeds]
    document = {
        "command": shlex.join(["python", "benchmarks/quickstart.py", *sys.argv[1:]]),
        "versions": {name: version(name) for name in ("perilune", "torch", "reasoning-gym")},
        "python": sys.version.split()[0],
        "processor": describe_machine()["processor"]["model"],
        "runs": runs,
        "pass@1": [
            {"seed": run["seed"]}
            | {evaluation["stage"]: evaluation["pass@1"]["mean"] for evaluation in run["evaluations"]}
            | {"gain_over_sft": run["gain"]["mean"], "low": run["gain"]["low"], "high": run["gain"]["high"]}
            | {"seconds": run["seconds"], "logprob_gap_max": run["logprob_gap_max"]}
            for run in runs
        ],
    }
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for run in runs:
        rates = " -> ".join(f"{evaluation['pass@1']['mean']:.3f}" for evaluation in run["evaluations"])
        gain = run["gain"]
        interval = f"{gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]"
        print(f"seed {run['seed']}: pass@1 {rates}, RL {interval}, {run['seconds']:.0f} s")


def quickstart(seed: int, overrides: list[str]) -> dict[str, Any]:
    """Run the quickstart in a new home, and return its figures."""
    with tempfile.TemporaryDirectory(prefix="perilune-quickstart-") as home:
        command = ["quickstart", "--seed", str(seed), "--json"]
        for override in overrides:
            command += ["--set", override]
        began = time.monotonic()
        done = subprocess.run(
            [Path(sys.executable).with_name("perilune"), *command],
            env={**os.environ, "PERILUNE_HOME": home},
            stdout=subprocess.PIPE,
            check=True,
        )
        seconds = time.monotonic() - began
        result = json.loads(done.stdout)
        climb = artifacts(result, "rl")
        curve = [json.loads(line) for line in (climb / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((climb / "summary.json").read_text())
        times = [json.loads(line) for line in (climb / "timings.jsonl").read_text().splitlines()]
    return {
        "seed": seed,
        "seconds": seconds,
        "stages": [
            {key: stage[key] for key in ("name", "seconds", "attempts")} for stage in result["stages"]
        ],
        "evaluations": [
            {"stage": row["stage"], **{key: row.get(key) for key in KEPT}} for row in result["evaluations"]
        ],
        "gain": result["evaluations"][-1]["change"]["pass@1"],
        "logprob_gap_max": summary["logprob_gap_max"],
        "split_seconds": {
            part: sum(line[part] for line in times) for part in ("sampling", "scoring", "learning", "other")
        },
        "curve": [{"step": line["step"], "pass_rate": line["pass_rate"]} for line in curve],
    }


def artifacts(result: dict[str, Any], stage: str) -> Path:
    """The folder of a stage's artifacts."""
    return Path(result["bundles"][stage]) / "artifacts"


if __name__ == "__main__":
    main()
