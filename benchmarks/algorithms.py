"""Compare algorithms from one cold start per seed, with equal budgets of episodes.

    python benchmarks/algorithms.py --tune
    python benchmarks/algorithms.py --seeds 0 1 2 3 4 5 6 7
    python benchmarks/algorithms.py --seeds 0 --settings chains --arms grpo ppo
    python benchmarks/algorithms.py --suite algorithms_smollm2 --tune

benchmarks/comparison/SUITE.yaml lists the arms. `--tune` tries every learning rate for every arm, on a seed
that the comparison does not use, and keeps the results. The comparison then trains each arm with its best
rate. Every arm starts from the checkpoint of its seed and is evaluated on the same held-out tasks.
results/SUITE.json is written after each arm, and an arm is measured again only if its recipe changed, so you
can interrupt the command and add seeds later. The suite algorithms_smollm2 trains a pretrained model in
PERILUNE_HOME: run `perilune model fetch smollm2-135m` first.
"""

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from perilune.errors import WorkFailedError
from perilune.execution.task_process import run_task
from perilune.files import read_json, read_json_lines
from recipe_runs import HERE, document, evidence, run_recipe, write

FOLDER = HERE / "comparison"
SUITES = ("algorithms", "algorithms_smollm2")
TUNING_SEED = 1000
Record = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """A model and its tasks, on which arms are compared.

    Attributes:
        arms: keys of the stage `rl` that each arm changes; the first arm is the reference.
        rates: the learning rates to try.
    """

    name: str
    recipe: Path
    arms: Mapping[str, Mapping[str, Any]]
    rates: Sequence[float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=SUITES, default=SUITES[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--settings", nargs="+", help="of the suite; all by default")
    parser.add_argument("--arms", nargs="+", help="of each setting; all by default")
    parser.add_argument("--set", action="append", default=[], help="as of `perilune run`, for every arm")
    parser.add_argument(
        "--home",
        type=Path,
        help="keep there what arms share, so that later calls need not make it again",
    )
    parser.add_argument("--out", type=Path, help="default: results/SUITE.json")
    parser.add_argument("--tune", action="store_true", help="choose the learning rate of each arm")
    arguments = parser.parse_args()
    out = arguments.out or HERE / "results" / f"{arguments.suite}.json"
    described_settings = read_suite(arguments.suite)
    previous = read_json(out) if out.exists() else {"records": []}
    rates: dict[str, dict[str, dict[str, float]]] = previous.get("learning_rates", {})
    records: dict[tuple[str, str, int], Record] = {key(record): record for record in previous["records"]}

    def save() -> None:
        suite = ["--suite", arguments.suite] if arguments.suite != SUITES[0] else []
        described = document("algorithms.py", [*suite, "--seeds", *seeds(records)], 0.0)
        del described["minutes"]
        ordered = [records[name] for name in sorted(records)]
        write(out, {**described, "settings": described_settings, "learning_rates": rates, "records": ordered})

    settings = [
        Setting(name, FOLDER / section["recipe"], only(section["arms"], arguments.arms), section["rates"])
        for name, section in only(described_settings, arguments.settings).items()
    ]
    if arguments.tune:
        for setting in settings:
            for arm, rate, reached in tuned(setting, arguments, rates.setdefault(setting.name, {})):
                rates[setting.name].setdefault(arm, {})[f"{rate:g}"] = reached
                save()
                print(
                    f"{time.strftime('%H:%M:%S')} {setting.name} {arm}, lr {rate:g}: {reached:.3f}",
                    flush=True,
                )
        return
    for seed in arguments.seeds:
        for setting in settings:
            for record in measured(setting, seed, arguments, records, rates.get(setting.name, {})):
                records[key(record)] = record
                save()
                print(line(record), flush=True)


def read_suite(name: str) -> dict[str, dict[str, Any]]:
    """The settings of a suite by name."""
    settings: dict[str, dict[str, Any]] = yaml.safe_load(
        (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    )
    return settings


def only(entries: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """The entries with these names; all without names."""
    return {name: entry for name, entry in entries.items() if names is None or name in names}


def tuned(
    setting: Setting, arguments: argparse.Namespace, known: Mapping[str, Mapping[str, float]]
) -> Iterator[tuple[str, float, float]]:
    """Yield pass@1 of each arm with each untried learning rate, on the tuning seed."""
    missing = [
        (arm, rate) for arm in setting.arms for rate in setting.rates if f"{rate:g}" not in known.get(arm, {})
    ]
    if not missing:
        return
    with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as folder:
        first = run_recipe(setting.recipe, TUNING_SEED, arguments.set, arguments.home or Path(folder))
        for number, (arm, rate) in enumerate(missing):
            try:
                stages = branch(first, {**setting.arms[arm], "lr": rate}, Path(folder) / str(number))
                yield arm, rate, stages["after_rl"]["summary"]["pass@1"]["mean"]
            except WorkFailedError:  # a check stopped the run, so the rate is useless
                yield arm, rate, 0.0


def with_best_rate(setting: Setting, rates: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """The keys of each arm with its best learning rate."""
    untuned = [arm for arm in setting.arms if len(rates.get(arm, {})) < len(setting.rates)]
    if untuned:
        raise SystemExit(f"no learning rate was chosen for {', '.join(untuned)}: run with --tune first")
    return {
        arm: {**keys, "lr": float(max(rates[arm], key=rates[arm].__getitem__))}
        for arm, keys in setting.arms.items()
    }


def measured(
    setting: Setting,
    seed: int,
    arguments: argparse.Namespace,
    known: Mapping[tuple[str, str, int], Record],
    rates: Mapping[str, Mapping[str, float]],
) -> Iterator[Record]:
    """Yield the missing records of one seed of a setting."""
    arms = with_best_rate(setting, rates)
    digests = {
        arm: hashlib.sha256(
            json.dumps([setting.recipe.read_text(), arguments.set, keys]).encode()
        ).hexdigest()[:16]
        for arm, keys in arms.items()
    }
    missing = [
        arm for arm in digests if known.get((setting.name, arm, seed), {}).get("digest") != digests[arm]
    ]
    if not missing:
        return
    with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as folder:
        first = run_recipe(setting.recipe, seed, arguments.set, arguments.home or Path(folder))
        for arm in missing:
            record = {"setting": setting.name, "arm": arm, "seed": seed, "digest": digests[arm]}
            try:
                stages = branch(first, arms[arm], Path(folder) / arm)
            except WorkFailedError as error:  # a run that a check stops is a result, too
                yield {**record, "failed": str(error)}
                continue
            yield {**record, **of_arm({**first, **stages})}


def branch(first: Mapping[str, Any], keys: Mapping[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """Run the jobs of the stages `rl` and `after_rl` again in this process, with other keys."""
    climb, answers = folder / "rl", folder / "after_rl"
    rerun(first["rl"]["folder"], climb, keys)
    rerun(first["after_rl"]["folder"], answers, {}, climb / "artifacts" / "checkpoints" / "final")
    return {"rl": evidence(climb), "after_rl": evidence(answers)}


def rerun(bundle: Path, folder: Path, keys: Mapping[str, Any], checkpoint: Path | None = None) -> None:
    """Run a bundle's job with some keys replaced, and from another checkpoint if one is given."""
    job = read_json(bundle / "job.json")
    (folder / "inputs").mkdir(parents=True)
    for link in (bundle / "inputs").iterdir():
        source = checkpoint if checkpoint and link.name == "checkpoint" else link
        (folder / "inputs" / link.name).symlink_to(source.resolve())
    (folder / "job.json").write_text(json.dumps({**job, "spec": {**job["spec"], **keys}}), encoding="utf-8")
    with (folder / "log.txt").open("w") as log, redirect_stdout(log):
        run_task(folder)


def of_arm(found: Mapping[str, Any]) -> Record:
    """The record of an arm: its evaluation, and its training curve by step."""
    before, after = (found.get("after_sft") or found["before"])["summary"], found["after_rl"]["summary"]
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
            "episodes": [line["groups"] * 8 for line in lines],
            "processor": [round(total, 3) for total in accumulate(row["processor"] for row in times)],
            "pass_rate": [round(line["pass_rate"], 4) for line in lines],
            "length": [round(line["length"], 2) for line in lines],
        },
    }


def counts(evaluation: Mapping[str, Any]) -> str:
    """Number of right answers of each task, as one digit per task in the order of task ids."""
    for task, n, _ in evaluation["correct_per_task"]:
        if n != evaluation["samples"] or n > 9:
            raise SystemExit(f"task {task} has {n} verdicts: its share does not fit a digit")
    return "".join(str(c) for _, _, c in sorted(evaluation["correct_per_task"]))


def key(record: Mapping[str, Any]) -> tuple[str, str, int]:
    return record["setting"], record["arm"], record["seed"]


def seeds(records: Mapping[tuple[str, str, int], Record]) -> list[str]:
    return [str(seed) for seed in sorted({seed for _, _, seed in records})]


def line(record: Record) -> str:
    """The progress line of a record."""
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
