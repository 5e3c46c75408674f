"""Train a model to explore long contexts with code, on 32 lines, and evaluate it on up to a million tokens.

    python benchmarks/recursion.py [--seeds 0 1 2] [--arms counting ...] [--home FOLDER] [--curve]

Trains recipes/recursive.yaml and its ablations, and evaluates each on longer contexts. results/recursion.json
is written after each arm, and an arm that it already has is not trained again. --curve evaluates the first
seed of the arm counting on contexts of up to a million tokens; its runs must be in --home.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from perilune.files import read_json
from recipe_runs import HERE, document, options, run_recipe, write

RECIPE = HERE.parent / "recipes" / "recursive.yaml"
LONG, TASKS = 2000, 64
CURVE = {128: 64, 512: 64, 8000: 16, 32_000: 4, 200_000: 2}  # lines: tasks
SANDBOX = {"seconds": 60, "memory_mb": 2048, "processes": 1, "scratch_mb": 64}
DOES_NOT_FIT = "shorten the prompt, or request fewer tokens"  # the remedy of that error
Record = dict[str, Any]


def main() -> None:
    parser = options(__doc__, "recursion")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--home", type=Path, help="keep the runs there")
    parser.add_argument("--curve", action="store_true", help="evaluate the first seed on many lengths")
    arguments = parser.parse_args()
    records: list[Record] = read_json(arguments.out)["records"] if arguments.out.exists() else []
    for seed in arguments.seeds:
        for arm in arguments.arms:
            if any((record["seed"], record["arm"]) == (seed, arm) for record in records):
                continue
            with tempfile.TemporaryDirectory(prefix="perilune-recursion-") as folder:
                records.append(measure(arm, seed, Path(folder), arguments.home))
            print(time.strftime("%H:%M:%S"), json.dumps(records[-1]), flush=True)
            save(arguments.out, records)
    if arguments.curve:
        (first, *_) = (record for record in records if record["arm"] == "counting")
        section = yaml.safe_load(RECIPE.read_text())["environment"]
        for lines, tasks in CURVE.items():
            if str(lines) not in first["at"]:
                first["at"][str(lines)] = evaluate(first["run"], section, lines, tasks, arguments.home)
                print(time.strftime("%H:%M:%S"), lines, first["at"][str(lines)], flush=True)
                save(arguments.out, records)


def measure(arm: str, seed: int, folder: Path, home: Path | None) -> Record:
    """Train an arm, and evaluate it on longer contexts."""
    began = time.monotonic()
    recipe = ARMS[arm](yaml.safe_load(RECIPE.read_text()))
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    stages = run_recipe(path, seed, home=home or folder / "home")
    rows = {"32 after SFT": figures(stages["after_sft"]), "32": figures(stages["after_rl"])}
    checkpoint = stages["rl"]["folder"].parents[1].name
    for lines in (64, LONG) if arm.startswith("direct") else (LONG,):
        rows[str(lines)] = evaluate(checkpoint, recipe["environment"], lines, TASKS, home or folder / "home")
    minutes = round((time.monotonic() - began) / 60, 1)
    return {"arm": arm, "seed": seed, "at": rows, "run": checkpoint, "minutes": minutes}


def evaluate(checkpoint: str, section: Mapping[str, Any], lines: int, tasks: int, home: Path) -> Record:
    """Figures of a checkpoint on contexts of `lines` lines; `fits` is False if the prompt does not fit.

    Raises:
        SystemExit: when the command fails for another reason.
    """
    settings = dict(section)
    if "tasks" in section:
        settings |= {"tasks": {**section["tasks"], "lengths": [lines]}, "asks": 10_000_000}
        settings |= {"sandbox": SANDBOX, "episodes": {"seconds": 600}}
    else:
        settings |= {"lengths": [lines]}
    command = [str(Path(sys.executable).with_name("perilune")), "eval", checkpoint, "--json"]
    command += ["--environment", settings.pop("id"), "--tasks", str(tasks), "--samples", "1"]
    command += ["--max-tokens", "120"]
    for key, value in settings.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    environment = {**os.environ, "PERILUNE_HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    if done.returncode and DOES_NOT_FIT in done.stderr:
        return {"tasks": tasks, "fits": False}
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nfailed:\n{done.stderr}")
    (bundle,) = json.loads(done.stdout)["bundles"].values()
    summary = json.loads((Path(bundle) / "artifacts" / "summary.json").read_text())
    return figures({"summary": summary}) | {"seconds": round(summary["seconds"], 1)}


def figures(stage: Mapping[str, Any]) -> Record:
    """Accuracies, and the shares of the strategies."""
    summary = stage["summary"]
    return {
        "tasks": summary["tasks"],
        "greedy": summary["greedy"]["mean"],
        "sampled": summary["pass@1"]["mean"],
        "strategies": {name: strategy["share"] for name, strategy in summary["strategies"].items()},
    }


def counting(recipe: dict[str, Any]) -> dict[str, Any]:
    """The unchanged recipe."""
    return recipe


def pairs(recipe: dict[str, Any]) -> dict[str, Any]:
    """Questions about all pairs of users."""
    recipe["environment"]["tasks"]["kinds"] = ["pairs"]
    recipe["environment"]["tasks"]["users"] = 5
    for stage in recipe["stages"]:
        if "max_tokens" in stage:
            stage["max_tokens"] = 240
    return recipe


def without_asks(recipe: dict[str, Any]) -> dict[str, Any]:
    """Code without the function that asks."""
    recipe["environment"]["depth"] = 0
    recipe["stages"][0]["strategies"] = {"lines": 0, "whole": 0, "guess": 1}
    return recipe


def without_code(recipe: dict[str, Any]) -> dict[str, Any]:
    """Questions about eight lines each, whose answers enter the context."""
    recipe["environment"] |= {"tool": "ask", "turns": 6}
    recipe["stages"][0]["strategies"] = {"lines": 0, "whole": 0, "guess": 0.5, "ranges": 0.5}
    return recipe


def direct(recipe: dict[str, Any]) -> dict[str, Any]:
    """All lines in the prompt, and notes before the answer."""
    recipe["environment"] = dict(recipe["environment"]["tasks"])
    recipe["stages"][0] |= {"teacher": "oolong", "strategies": {"worked": 0.6, "direct": 0.4}}
    return recipe


def direct_pairs(recipe: dict[str, Any]) -> dict[str, Any]:
    """All lines in the prompt, for questions about all pairs of users."""
    return direct(pairs(recipe))


ARMS = {
    "counting": counting,
    "pairs": pairs,
    "direct": direct,
    "direct, pairs": direct_pairs,
    "without asks": without_asks,
    "without code": without_code,
}


def save(path: Path, records: list[Record]) -> None:
    seeds = sorted({record["seed"] for record in records})
    provenance = document("recursion.py", ["--seeds", *map(str, seeds)], 0.0)
    del provenance["minutes"]
    ordered = sorted(records, key=lambda record: (list(ARMS).index(record["arm"]), record["seed"]))
    write(path, provenance | {"records": ordered})


if __name__ == "__main__":
    main()
