"""Test the control plane with hundreds of short runs under injected faults.

    python benchmarks/soak.py                              ten minutes, then results/soak.json and its page
    python benchmarks/soak.py --seconds 60 --out soak.json

`perilune lab` submits runs for this time, injects the faults that `docs/how-to/lab.md` lists, and waits until
all runs have ended. CPU seconds include all processes that it starts: the control processes, the cloud, its
machines, and the runs on them. The benchmark always writes its result. It exits with 1 if an invariant is
violated or a run is lost.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perilune.bundle.machine import describe_machine
from perilune.execution.processes import adopt_orphans

HERE = Path(__file__).parent
RESULT = HERE / "results" / "soak.json"


def soak(seconds: float, at_once: int, seed: int) -> tuple[dict[str, Any], float]:
    """Return the final report of `perilune lab`, and the CPU seconds of all its processes.

    Raises:
        RuntimeError: if it exits without a report.
    """
    adopt_orphans()  # so that machines of a killed cloud count as our children
    words = ["--seconds", str(seconds), "--at-once", str(at_once), "--seed", str(seed), "--json"]
    command = [sys.executable, "-m", "perilune.cli.main", "lab", "--patience", "900", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    while _reaped():
        pass
    used = os.times()
    if not done.stdout:
        raise RuntimeError(f"perilune lab exited with {done.returncode} and without a report")
    return json.loads(done.stdout), used.children_user + used.children_system


def _reaped() -> bool:
    """Wait for one descendant to end. False if there is none."""
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        return False
    return True


def figures(seconds: float, at_once: int, told: Mapping[str, Any], cpu_seconds: float) -> dict[str, Any]:
    """The result, from the report of `perilune lab`."""
    broken = {invariant["name"]: len(invariant["violations"]) for invariant in told["invariants"]}
    accepted = sum(told["runs"].values())
    return {
        "outcome": [
            {
                "runs accepted": accepted,
                "lost runs": broken["I1"],
                "leaked machines": broken["I4"],
                "runs with two results": broken["I2"],
            }
        ],
        "injected faults": told["faults"],
        "attempts": told["attempts"],
        "invariants": {
            invariant["name"]: {
                "invariant": invariant["invariant"],
                "violations": broken[invariant["name"]],
                "where": invariant["violations"][:3],
            }
            for invariant in told["invariants"]
        },
        "pace": [
            {
                "seconds of submission": seconds,
                "seconds until all runs had ended": told["elapsed"],
                "runs per minute of submission": 60 * accepted / seconds,
                "attempts per run": sum(told["attempts"].values()) / max(accepted, 1),
                "CPU seconds per run": cpu_seconds / max(accepted, 1),
                "runs per CPU minute": 60 * accepted / cpu_seconds,
            }
        ],
        "runs at once": at_once,
        "seed": told["seed"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    report, cpu_seconds = soak(args.seconds, args.at_once, args.seed)
    result = figures(args.seconds, args.at_once, report, cpu_seconds)
    document = {
        "title": "Soak test of the control plane: injected faults",
        "about": "The lab runs with `--weather stormy`, which injects many faults, and kills the control "
        "process and the cloud repeatedly. The table of injected faults counts each "
        "[kind](../how-to/lab.md). The lab then checks the invariants in the results, the database and the "
        "bill of the cloud.",
        "command": f"python benchmarks/soak.py --seconds {args.seconds:.0f} --at-once {args.at_once}"
        f" --seed {args.seed}",
        **result,
        "machine": describe_machine(),
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    if args.out == RESULT:
        subprocess.run([sys.executable, str(HERE / "report.py")], check=True)
    return 1 if any(verdict["violations"] for verdict in result["invariants"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
