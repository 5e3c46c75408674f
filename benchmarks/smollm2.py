"""Measure the accuracy of the recipes for SmolLM2-135M-Instruct over several seeds.

    perilune model fetch smollm2-135m
    python benchmarks/smollm2.py --recipes instructions preference --seeds 0 1 2

Runs the bundled recipes of smollm2/ in PERILUNE_HOME, where finished stages do not run again. Adds the
results to results/smollm2.json, where they replace those of the same recipe and seed. A recipe takes
ten minutes to an hour on two cores.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perilune.recipe.load import bundled_recipe
from recipe_runs import document, options, run_recipe, write

RECIPES = (
    *("arithmetic", "calculator", "families", "flywheel"),
    *("instructions", "lora", "preference", "system_prompt"),
)


def main() -> None:
    parser = options(__doc__, "smollm2")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    arguments = parser.parse_args()
    home = Path(os.environ.get("PERILUNE_HOME", Path.home() / ".perilune"))
    for recipe in arguments.recipes:
        for seed in arguments.seeds:
            began = time.monotonic()
            stages = run_recipe(bundled_recipe(f"smollm2/{recipe}"), seed, home=home)
            origin = document("smollm2.py", sys.argv[1:], began)
            add(arguments.out, recipe, seed, {name: figures(stage) for name, stage in stages.items()}, origin)


def figures(stage: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of an evaluation or a training stage that the page shows."""
    summary = stage["summary"]
    row = {key: summary[key] for key in ("pass@1", "greedy", "length") if key in summary}
    if parts := summary.get("by_environment"):
        row["parts"] = {name: part["pass@1"] for name, part in parts.items()}
    row["seconds"] = round(summary["seconds"])
    if "forgetting" in summary:
        text = summary["forgetting"]["text"]["perplexity"]
        row["perplexity of English"] = [text["before"], text["after"]]
        row["other environments"] = {
            entry["environment"]: [entry["pass@1"][side]["mean"] for side in ("before", "after")]
            for entry in summary["forgetting"]["environments"]
        }
        row["KL to the start, nats per answer"] = summary["forgetting"]["kl"]["per_answer"]["mean"]
        if "memory" in summary:
            row["peak GiB"] = round(summary["memory"]["peak_bytes"] / 2**30, 1)
    return row


def add(path: Path, recipe: str, seed: int, stages: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """Add a run to the result, in place of an earlier run of the same recipe and seed."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    others = [run for run in runs if (run["recipe"], run["seed"]) != (recipe, seed)]
    run = {"recipe": recipe, "seed": seed, "stages": stages, **made}
    write(path, {"runs": sorted([*others, run], key=lambda run: (RECIPES.index(run["recipe"]), run["seed"]))})
    rates = {name: round(stage["pass@1"]["mean"], 3) for name, stage in stages.items() if "pass@1" in stage}
    print(f"{recipe}, seed {seed}: {rates}", flush=True)


if __name__ == "__main__":
    main()
