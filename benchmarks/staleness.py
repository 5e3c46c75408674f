"""Compare off-policy corrections when the weights that sample lag behind the weights that learn.

    python benchmarks/staleness.py [--seeds 0 1 2] [--staleness 1 2 4 8 16] [--arms clip tis ...]

A schedule log fixes the staleness: step k trains on groups that the weights after step k - 1 - staleness
sampled, every token of them. Every arm starts from the cold start of comparison/sums.yaml of its seed.
results/staleness.json is written after each run, and runs that it already has are skipped.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from algorithms import FOLDER, counts, rerun
from perilune.bundle.workspace import SCHEDULE
from perilune.errors import ProcessLostError, WorkFailedError
from perilune.files import append_json_line, read_json
from recipe_runs import document, evidence, options, run_recipe, write

STEPS, PROMPTS, SAMPLES, UPDATES = 40, 32, 8, 4
WHOLE = 1_000_000  # tokens: more than any episode has
STALENESS = (1, 2, 4, 8, 16)
ARMS: dict[str, dict[str, Any]] = {
    "clip": {},
    "none": {"proximal": "learner"},
    "tis": {"proximal": "learner", "weight": "truncate"},
    "icepop": {"proximal": "learner", "weight": "mask", "bounds": [0.5, 5.0]},
    "sequence": {"proximal": "learner", "weight": "truncate", "level": "sequence-product"},
    "vcpo": {"proximal": "learner", "weight": "truncate", "level": "sequence-product", "ess_target": 0.5},
}
Record = dict[str, Any]


def main() -> None:
    parser = options(__doc__, "staleness")
    parser.add_argument("--staleness", type=int, nargs="+", default=list(STALENESS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--home", type=Path, help="keep the cold starts there, for later calls")
    arguments = parser.parse_args()
    records: list[Record] = read_json(arguments.out)["records"] if arguments.out.exists() else []
    for seed in arguments.seeds:
        for record in measured(seed, arguments, {name(row) for row in records if row["seed"] == seed}):
            records.append(record)
            print(time.strftime("%H:%M:%S"), told(record), flush=True)
            save(arguments.out, records)


def save(path: Path, records: list[Record]) -> None:
    seeds = sorted({record["seed"] for record in records})
    provenance = document("staleness.py", ["--seeds", *map(str, seeds)], 0.0)
    del provenance["minutes"]
    settings = {"steps": STEPS, "prompts": PROMPTS, "samples": SAMPLES, "updates": UPDATES}
    ordered = sorted(records, key=lambda row: (row["seed"], row["staleness"], list(ARMS).index(row["arm"])))
    write(path, provenance | {"settings": settings, "arms": ARMS, "records": ordered})


def measured(seed: int, arguments: argparse.Namespace, known: set[tuple[int, str]]) -> Iterator[Record]:
    """Yield the missing records of a seed. Staleness 0 has one arm, because all are nearly equal."""
    cells = [(0, "tis"), *((age, arm) for age in arguments.staleness for arm in arguments.arms)]
    missing = [cell for cell in cells if cell not in known]
    if not missing:
        return
    with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as folder:
        short = ["rl.steps=1", "after_rl.tasks=256", "after_sft.tasks=256"]
        first = run_recipe(FOLDER / "sums.yaml", seed, short, arguments.home or Path(folder))
        for age, arm in missing:
            record = {"seed": seed, "staleness": age, "arm": arm}
            try:
                stages = climb(first, age, arm, Path(folder) / f"{arm}-{age}")
            except ProcessLostError:
                raise
            except WorkFailedError as error:  # a run that a check stops is a result, too
                yield {**record, "failed": str(error)}
                continue
            yield {**record, **figures(first, stages)}


def climb(first: Mapping[str, Any], age: int, arm: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Run the stages `rl` and `after_rl` with a staleness and a correction."""
    keys = {
        "steps": STEPS,
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "updates_per_batch": UPDATES,
        "asynchronous": {"staleness": age},
        "off_policy": ARMS[arm],
    }
    trained, answers = folder / "rl", folder / "after_rl"
    write_schedule(trained / "runtime" / SCHEDULE, age)
    rerun(first["rl"]["folder"], trained, keys, first["rl"]["folder"] / "inputs" / "checkpoint")
    rerun(first["after_rl"]["folder"], answers, {}, trained / "artifacts" / "checkpoints" / "final")
    return {"rl": evidence(trained), "after_rl": evidence(answers)}


def write_schedule(path: Path, age: int) -> None:
    """Write a schedule log in which every token of a step has the same age."""
    path.parent.mkdir(parents=True)
    for step in range(1, STEPS + 1):
        spans = [[UPDATES * max(0, step - 1 - age), WHOLE]]
        groups = [[number, [spans] * SAMPLES] for number in range((step - 1) * PROMPTS, step * PROMPTS)]
        append_json_line(path, {"step": step, "groups": groups})


def figures(first: Mapping[str, Any], found: Mapping[str, Any]) -> Record:
    """The figures of a run."""
    lines, after = found["rl"]["metrics"], found["after_rl"]["summary"]
    return {
        "before": first["after_sft"]["summary"]["pass@1"]["mean"],
        "pass@1": after["pass@1"]["mean"],
        "greedy": after["greedy"]["mean"],
        "correct": counts(after),
        "staleness of tokens": fmean(line["staleness"] for line in lines),
        "ess": fmean(line["off_policy/ess"] for line in lines) if "off_policy/ess" in lines[-1] else None,
        "entropy at the end": lines[-1]["entropy"],
        "pass_rate": [round(line["pass_rate"], 4) for line in lines],
    }


def name(record: Record) -> tuple[int, str]:
    return record["staleness"], record["arm"]


def told(record: Record) -> str:
    """The progress line of a record."""
    head = f"seed {record['seed']} staleness {record['staleness']} {record['arm']}"
    if "failed" in record:
        return f"{head}: {record['failed']}"
    return f"{head}: {record['before']:.3f} -> {record['pass@1']:.3f}, effective share {record['ess']}"


if __name__ == "__main__":
    main()
