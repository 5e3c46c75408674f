"""Do the algorithms differ? One cold start a seed, one budget of episodes, many ways to learn from them.

    python benchmarks/algorithms.py --seeds 0 1 2
    python benchmarks/algorithms.py --seeds 0 --settings chains --arms grpo ppo

What is compared stands in benchmarks/comparison/arms.yaml. Every arm starts from the same checkpoint as the
others of its seed, and is evaluated on the same held-out tasks. What was measured is kept in
results/algorithms.json after each arm, and not measured again unless its recipe changed: the command can be
interrupted, and seeds added. All arms of a seed come before the next seed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from perilune.errors import WorkFailedError
from perilune.execution.task_process import run_task
from perilune.files import read_json, read_json_lines
from recipe_runs import HERE, document, evidence, run_recipe, write

FOLDER = HERE / "comparison"
SETTINGS: dict[str, Any] = yaml.safe_load((FOLDER / "arms.yaml").read_text(encoding="utf-8"))
Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--arms", nargs="+", help="of each setting; all by default")
    parser.add_argument("--set", action="append", default=[], help="as of `perilune run`, for every arm")
    parser.add_argument(
        "--home",
        type=Path,
        help="keep there what arms share, so that later calls need not make it again",
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "algorithms.json")
    arguments = parser.parse_args()
    held = read_json(arguments.out) if arguments.out.exists() else {"records": []}
    records: dict[tuple[str, str, int], Record] = {key(one): one for one in held["records"]}
    for seed in arguments.seeds:
        for setting in arguments.settings:
            for record in measured(setting, seed, arguments, records):
                records[key(record)] = record
                told = {**document("algorithms.py", ["--seeds", *seeds(records)], 0.0)}
                told.pop("minutes")
                ordered = [records[name] for name in sorted(records)]
                write(arguments.out, {**told, "settings": SETTINGS, "records": ordered})
                print(line(record), flush=True)


def measured(
    setting: str, seed: int, arguments: argparse.Namespace, held: Mapping[tuple[str, str, int], Record]
) -> Iterator[Record]:
    """The records of one seed of a setting that are not held yet."""
    recipe = FOLDER / SETTINGS[setting]["recipe"]
    arms: dict[str, dict[str, Any]] = SETTINGS[setting]["arms"]
    digests = {
        arm: hashlib.sha256(json.dumps([recipe.read_text(), arguments.set, keys]).encode()).hexdigest()[:16]
        for arm, keys in arms.items()
        if not arguments.arms or arm in arguments.arms
    }
    missing = [arm for arm in digests if held.get((setting, arm, seed), {}).get("digest") != digests[arm]]
    if not missing:
        return
    with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as folder:
        first = run_recipe(recipe, seed, arguments.set, arguments.home or Path(folder))
        for arm in missing:
            record = {"setting": setting, "arm": arm, "seed": seed, "digest": digests[arm]}
            try:
                alike = arm == next(iter(arms))  # the recipe as it stands is the first arm
                found = {} if alike else branch(first, arms[arm], Path(folder) / arm)
            except WorkFailedError as error:  # what the checks of a run stop is a result too
                yield {**record, "failed": str(error)}
                continue
            yield {**record, **of_arm({**first, **found})}


def branch(first: Mapping[str, Any], keys: Mapping[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """The stages `rl` and `after_rl` once more, with other keys: their bundles' jobs, run in this process."""
    climb, answers = folder / "rl", folder / "after_rl"
    rerun(first["rl"]["folder"], climb, keys, first["rl"]["folder"] / "inputs" / "checkpoint")
    rerun(first["after_rl"]["folder"], answers, {}, climb / "artifacts" / "checkpoints" / "final")
    return {"rl": evidence(climb), "after_rl": evidence(answers)}


def rerun(bundle: Path, folder: Path, keys: Mapping[str, Any], checkpoint: Path) -> None:
    """Run a bundle's job with some keys replaced, from another checkpoint."""
    job = read_json(bundle / "job.json")
    (folder / "inputs").mkdir(parents=True)
    (folder / "inputs" / "checkpoint").symlink_to(checkpoint.resolve())
    (folder / "job.json").write_text(json.dumps({**job, "spec": {**job["spec"], **keys}}), encoding="utf-8")
    with (folder / "log.txt").open("w") as log, redirect_stdout(log):
        run_task(folder)


def of_arm(found: Mapping[str, Any]) -> Record:
    """What is kept of an arm: its evaluation, and its climb step by step."""
    before, after = found["after_sft"]["summary"], found["after_rl"]["summary"]
    lines = found["rl"]["metrics"]
    times = list(read_json_lines(found["rl"]["folder"] / "artifacts" / "timings.jsonl"))
    return {
        "before": {"pass@1": before["pass@1"], "length": before["length"]["mean"]},
        **{name: after[name] for name in ("pass@1", "pass@8", "greedy")},
        "correct": counts(after),
        "length": after["length"]["mean"],
        "strategies": after["strategies"],
        "seconds": found["rl"]["summary"]["seconds"],
        "curve": {
            "episodes": [one["groups"] * 8 for one in lines],
            "processor": [round(one, 3) for one in accumulate(row["processor"] for row in times)],
            "pass_rate": [round(one["pass_rate"], 4) for one in lines],
            "length": [round(one["length"], 2) for one in lines],
        },
    }


def counts(evaluation: Mapping[str, Any]) -> str:
    """Right answers of each task, a digit a task in the order of their ids."""
    for task, n, _ in evaluation["correct_per_task"]:
        if n != evaluation["samples"] or n > 9:
            raise SystemExit(f"task {task} has {n} verdicts: its share does not fit a digit")
    return "".join(str(c) for _, _, c in sorted(evaluation["correct_per_task"]))


def key(record: Mapping[str, Any]) -> tuple[str, str, int]:
    return record["setting"], record["arm"], record["seed"]


def seeds(records: Mapping[tuple[str, str, int], Record]) -> list[str]:
    return [str(one) for one in sorted({seed for _, _, seed in records})]


def line(record: Record) -> str:
    """One record as told while it is measured."""
    head = f"{time.strftime('%H:%M:%S')} seed {record['seed']} {record['setting']} {record['arm']}"
    if "failed" in record:
        return f"{head}: {record['failed']}"
    curve = record["curve"]
    return (
        f"{head}: {record['before']['pass@1']['mean']:.3f} -> {record['pass@1']['mean']:.3f}, "
        f"length {record['length']:.1f}, {sum(curve['episodes'])} episodes, "
        f"{curve['processor'][-1]:.0f} processor seconds of {record['seconds']:.0f}"
    )


if __name__ == "__main__":
    main()
