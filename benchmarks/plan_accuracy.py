"""Compare predictions of `--plan` with real runs: time and peak memory of five recipes.

    python benchmarks/plan_accuracy.py

`perilune doctor` calibrates the machine in a new home. Then each recipe is estimated, runs from the start,
and is compared with its estimate. No recipe has run in the home before. Run the benchmark on an idle machine.
It takes about ten minutes. Writes results/plan_accuracy.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from perilune.recipe.load import bundled_recipe
from recipe_runs import HERE, document, write

OWN = """name: own_files
model: {{preset: tiny}}
resources: {{threads: 1}}
stages:
  - {{name: sft, task: sft, data: {folder}/answers.jsonl, steps: 300, batch_size: 32}}
  - {{name: dpo, task: preference, checkpoint: sft, data: {folder}/pairs.jsonl, steps: 100, lr: 3.0e-4}}
"""
RECIPES: dict[str, tuple[str, ...]] = {
    "calculator": (),
    "games": (),
    "tools": ("sft.steps=100", "rl.steps=8"),
    "planning": ("traces.traces=6000", "sft.steps=200", "rl.steps=20"),
    "own_files": (),
}
ABOUT = {
    "calculator": "SFT and GRPO in several turns",
    "games": "SFT on games, evaluation against two opponents",
    "tools": "SFT and GRPO with Python in a sandbox",
    "planning": "SFT and GRPO on long answers",
    "own_files": "SFT and DPO on JSON Lines",
}


def command(home: Path, *words: str) -> Any:
    """Run a command of perilune with JSON output in a home."""
    words = (str(Path(sys.executable).with_name("perilune")), *words, "--json")
    environment = {**os.environ, "PERILUNE_HOME": str(home)}
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def own_files(folder: Path) -> str:
    """Write a recipe with the user's own files: sums with their working, and pairs of answers."""
    answers, pairs = [], []
    for first in range(100, 1000, 3):
        for second in (17, 123, 456, 789):
            prompt = f"{first}+{second}="
            total = first + second
            working = f"{first // 100}{second // 100},{first % 100:02d}{second % 100:02d};{total}"
            answers.append({"prompt": prompt, "completion": working})
            pairs.append({"prompt": prompt, "chosen": working, "rejected": str(total + 10)})
    for name, rows in (("answers", answers), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own_files.yaml").write_text(OWN.format(folder=folder))
    return str(folder / "own_files.yaml")


def measured(home: Path, recipe: str, overrides: tuple[str, ...]) -> list[dict[str, Any]]:
    """Run a recipe, and return its stages with their estimates."""
    words = ["run", recipe] + [word for override in overrides for word in ("--set", override)]
    stages = command(home, *words)["stages"]
    for stage in stages:
        print(f"  {stage['name']:14} {stage['compared']}", flush=True)
    return list(stages)


def row(name: str, stages: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a recipe. Its memory is that of the stage with the highest peak."""
    assert all(stage["estimated"] for stage in stages), "the machine has no calibration"
    took = sum(stage["seconds"] for stage in stages)
    low, middle, high = (
        sum(stage["estimated"][end] for stage in stages) for end in ("low", "seconds", "high")
    )
    peak = max((item for item in stages if item["memory"]), key=lambda item: item["memory"]["peak_bytes"])
    bytes_ = peak["memory"]["peak_bytes"]
    return {
        "recipe": name,
        "stages": ABOUT[name],
        "estimated seconds": round(middle, 1),
        "range of the estimate, seconds": f"{low:.0f} to {high:.0f}",
        "measured seconds": round(took, 1),
        "error of time, %": round(100 * (middle / took - 1), 1),
        "estimated MiB": round(peak["estimated"]["memory"] / 2**20),
        "measured peak MiB": round(bytes_ / 2**20),
        "error of memory, %": round(100 * (peak["estimated"]["memory"] / bytes_ - 1), 1),
    }


def main() -> None:
    """Calibrate, run the recipes and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "plan_accuracy.json")
    arguments = parser.parse_args()
    began, rows, stages = time.monotonic(), [], []
    with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as folder:
        home = Path(folder) / "home"
        command(home, "doctor")
        calibrated = time.monotonic() - began
        for name in arguments.only:
            print(name, flush=True)
            path = own_files(Path(folder)) if name == "own_files" else str(bundled_recipe(name))
            recipe_stages = measured(home, path, RECIPES[name])
            rows.append(row(name, recipe_stages))
            stages += [
                {
                    "stage": f"{name}/{stage['name']}",
                    "task": stage["task"],
                    "estimated seconds": round(stage["estimated"]["seconds"], 1),
                    "measured seconds": round(stage["seconds"], 1),
                    "error, %": round(100 * (stage["estimated"]["seconds"] / stage["seconds"] - 1), 1),
                }
                for stage in recipe_stages
            ]
    result = {
        "title": "Accuracy of `--plan`: time and memory",
        "about": "The recipes ran on one thread after the estimate. The home directory was empty, so "
        "Perilune knew no answer lengths from earlier runs. `perilune doctor` had calibrated the machine, "
        f"in {calibrated:.0f} s. An error is the estimate minus the measurement, divided by the measurement.",
        **document("plan_accuracy.py", sys.argv[1:], began),
        "recipes": rows,
        "by_stage": stages,
    }
    write(arguments.out, result)
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
